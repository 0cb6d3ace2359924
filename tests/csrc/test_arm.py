"""The ARM kernels, cross-compiled and tested with random cases in an emulator.

The driver (tests/sanitize) compares every function with plain loops, with guard pages around each
array. SVE is not built: server processors have two 256-bit pipes for it and four 128-bit pipes for
NEON, which gives the same throughput.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GCC = [
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
]
CASES = 200


def cmake() -> str:
    cmake = pytest.importorskip("cmake")
    return str(Path(cmake.CMAKE_BIN_DIR) / "cmake")


def build(source: Path, folder: Path, *options: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "DYNSPARSE_NATIVE")}
    for command in (
        [cmake(), "-S", str(source), "-B", str(folder), *options],
        [cmake(), "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=1200, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr


def emulator() -> str | None:
    return shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def drive(*words: str | Path) -> subprocess.CompletedProcess[str]:
    emulated = [str(emulator()), "-L", "/usr/aarch64-linux-gnu", *map(str, words)]
    environment = {"OMP_WAIT_POLICY": "passive", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        emulated, capture_output=True, text=True, check=False, timeout=600, env=environment
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("needs aarch64-linux-gnu-g++, the cross compiler for ARM")
    if emulator() is None:
        pytest.skip("needs qemu-aarch64, the emulator of ARM")
    folder = tmp_path_factory.mktemp("driver")
    build(ROOT / "tests" / "sanitize", folder, "-DSANITIZE=none", *GCC)
    return folder / "driver"


@pytest.mark.slow
def test_emulator_detects_errors(driver: Path):
    for control in ("read", "write-frozen", "wrong-result"):
        assert drive(driver, "--control", control).returncode != 0, control


@pytest.mark.slow
def test_random_cases_on_arm(driver: Path, tmp_path: Path):
    build(ROOT, tmp_path, "-DCMAKE_BUILD_TYPE=Release", *GCC)
    library = tmp_path / "csrc" / "libdynsparse_neon.so"
    for callers in ("1", "3"):
        words = ["--seconds", "400", "--cases", str(CASES), "--callers", callers]
        done = drive(driver, library, *words, "--seed", callers)
        assert done.returncode == 0, done.stdout + done.stderr
        cases = re.match(r"(\d+) cases", done.stdout)
        assert cases
        assert int(cases.group(1)) == CASES
