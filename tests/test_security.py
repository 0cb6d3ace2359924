"""As SECURITY.md promises, the source uses no function that executes code from files."""

import ast
import re
from pathlib import Path

import pytest

from dynsparse._core.files.limits import VARIABLE

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "src").rglob("*.py"))
# Modules that make objects, or run what they read, by name.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "compile", "__import__", "literal_eval"}


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def wrong_in(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name, given = name_of(node.func), {key.arg: key.value for key in node.keywords}
            last = name.rpartition(".")[2]
            true = {key for key, value in given.items() if getattr(value, "value", None) is True}
            if name in CALLS or (last == "literal_eval"):
                found.append(name)
            elif name.endswith("torch.load") and "weights_only" not in true:
                found.append(f"{name} without weights_only=True")
            elif name in ("np.load", "numpy.load") and (
                "allow_pickle" in true or "allow_pickle" not in given
            ):
                found.append(f"{name} without allow_pickle=False")
            elif re.fullmatch(r"yaml\.(\w*load\w*|Loader|UnsafeLoader|FullLoader)", name):
                found.append(name)
            elif name in ("os.system", "os.popen") or "shell" in true:
                found.append(f"{name} through a shell")
            elif last in ("extract", "extractall", "unpack_archive"):
                found.append(f"{name} of an archive")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_functions_that_execute_file_contents(file):
    assert wrong_in(ast.parse(file.read_text())) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import torch; torch.load(f)",
        "torch.load(f, weights_only=False)", "yaml.load(f, yaml.SafeLoader)", "yaml.unsafe_load(f)",
        "eval(text)", "exec(text)", "ast.literal_eval(text)", "np.load(f)",
        "np.load(f, allow_pickle=True)", "os.system(x)", "subprocess.run(x, shell=True)",
        "archive.extractall()",
    ],
)  # fmt: skip
def test_forbidden_calls_are_detected(line):
    assert wrong_in(ast.parse(line))


def test_allowed_calls_pass():
    code = "torch.load(f, weights_only=True); np.load(f, allow_pickle=False); re.compile(x)"
    assert wrong_in(ast.parse(code)) == []


def test_page_names_the_actual_limits():
    from dynsparse._core.files import limits

    page = (ROOT / "SECURITY.md").read_text()
    assert VARIABLE in page
    assert f"{limits._TIMES} times its size unpacked, or {limits._LEAST >> 20} MiB" in page
    assert f"{limits._LEAST // limits._JSON_MEMORY >> 20} MiB, nested {limits.MOST_DEPTH}" in page
    assert f"{limits._LEAST // 8:,} inputs and outputs" in page
