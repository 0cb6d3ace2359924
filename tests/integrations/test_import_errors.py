"""Integrations name the package that is missing, and show why one that is installed fails."""

import os
import subprocess
import sys
from fnmatch import fnmatchcase

import pytest

PACKAGES = {
    "huggingface": "transformers",
    "keras": "keras",
    "lightning": "lightning",
    "onnx.graph": "onnx",
    "peft": "peft",
}
CODE = """
import sys
from importlib import import_module

pairs = [pair.split("=") for pair in sys.argv[2:]]


class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == package for _, package in pairs):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if sys.argv[1] == "missing":
    sys.meta_path.insert(0, Missing())
for module, package in pairs:
    try:
        import_module("dynsparse.integrations." + module)
        if module == "onnx.graph":
            import_module("dynsparse.integrations.onnx.graph").import_library("onnx")
    except ImportError as error:
        print(package, type(error).__name__, error, sep="|")
"""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "ImportError|* need* the package {0}: pip install *"),
        ("import lacking_part", "ModuleNotFoundError|No module named 'lacking_part'"),
        ("raise ImportError('built for another torch')", "ImportError|built for another torch"),
    ],
)
def test_errors(tmp_path, content, expected):
    for package in PACKAGES.values():
        if content is not None:
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").write_text(content)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    state = "missing" if content is None else "broken"
    pairs = [f"{module}={package}" for module, package in PACKAGES.items()]
    result = subprocess.run(
        [sys.executable, "-c", CODE, state, *pairs],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert len(lines) == len(PACKAGES), result.stderr
    for package, line in zip(PACKAGES.values(), lines, strict=True):
        assert fnmatchcase(line, f"{package}|{expected.format(package)}")
