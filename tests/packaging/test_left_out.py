"""Without a suitable compiler the package installs without kernels and reports why, by CMake alone.

`make test-wheels` does the same with pip, in clean environments, and with kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dynsparse._core import native

ROOT = Path(__file__).resolve().parents[2]

REFUSES = """#!/bin/sh
for word in "$@"; do
  case "$word" in -fopenmp*) echo "error: unsupported option '-fopenmp'" >&2; exit 1;; esac
done
exec {} "$@"
"""
# Of these it is the one that CMake asks for its version, and the one without the shuffles.
OLD = """#!/bin/sh
exec {} -U__GNUC__ -D__GNUC__=11 -D__builtin_shufflevector=not_yet "$@"
"""


def installed(folder: Path, **environment: str | None) -> str:
    """Return why the kernels were left out, or "" if they would be built."""
    tools = pytest.importorskip("cmake")
    cmake = str(Path(tools.CMAKE_BIN_DIR) / "cmake")
    own = {**os.environ, **{k: v for k, v in environment.items() if v is not None}}
    for name in [k for k, v in environment.items() if v is None]:
        own.pop(name, None)
    configure = [cmake, "-S", str(ROOT), "-B", str(folder / "build")]
    install = [cmake, "--install", str(folder / "build"), "--prefix", str(folder / "out")]
    done = subprocess.run(configure, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    file = folder / "build" / "left_out.txt"
    if not file.exists():
        return ""
    subprocess.run(install, env=own, capture_output=True, check=True)
    reason = (folder / "out" / "dynsparse" / "_native" / "left_out.txt").read_text().strip()
    assert "the compiled kernels are left out" in done.stderr  # for those who ask pip for it
    assert reason.split()[0] in done.stderr
    return reason


def wrapper(folder: Path, script: str) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    path = folder / "compiler"
    path.write_text(script.format(compiler))
    path.chmod(0o755)
    return str(path)


def test_disabled_kernels(tmp_path: Path):
    reason = installed(tmp_path, DYNSPARSE_NATIVE="0")
    assert reason == "they were not asked for (DYNSPARSE_NATIVE=0 at the installation)"


def test_compiler_without_openmp_is_reported(tmp_path: Path):
    compiler = wrapper(tmp_path, REFUSES)
    reason = installed(tmp_path, CXX=compiler, DYNSPARSE_NATIVE=None)
    assert reason.startswith("they need OpenMP, which the compiler, GNU ")
    assert reason.endswith(f"({compiler}), refused")


def test_too_old_compiler_is_reported(tmp_path: Path):
    compiler = wrapper(tmp_path, OLD)
    reason = installed(tmp_path, CXX=compiler, DYNSPARSE_NATIVE=None)
    assert reason.startswith("they need GCC 12 or Clang 12, and the compiler was GNU 11.")
    assert reason.endswith(f"({compiler})")


def test_broken_compiler_is_reported(tmp_path: Path):
    path = tmp_path / "broken"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    reason = installed(tmp_path, CXX=str(path), DYNSPARSE_NATIVE=None)
    assert reason == "there was no C++ compiler that works at the installation"


@pytest.mark.skipif(not native._built_isas(), reason="needs a compiler that builds the kernels")
def test_missing_compiler_of_python_is_ignored(tmp_path: Path):
    """The build backend sets CXX to the compiler of Python; if it is missing, another is used."""
    if not shutil.which("c++"):
        pytest.skip("needs c++")
    assert installed(tmp_path, CXX="not-here-g++ -pthread", DYNSPARSE_NATIVE=None) == ""
