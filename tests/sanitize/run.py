"""Build the kernels under sanitizers and run them on random cases; `make sanitize`.

Three ways, each over the instruction sets of this machine, with one and with three callers at a
time, and each preceded by controls: errors in the driver that must be noticed.

- guard: the kernels as installed, every array between pages that must not be touched;
- address: under the address and undefined-behaviour sanitizers, scratch memory without slack;
- thread: under the thread sanitizer. That needs Clang with its own OpenMP runtime and Archer, which
  tells the sanitizer how OpenMP orders what threads do; it is left out, aloud, where they are not.

    python tests/sanitize/run.py [--ways guard address thread] [--seconds 60] [--seed K] [--quick]

`--quick` builds one instruction set without optimization, and drives a few seconds. Exit status 1
where something was found or a control was not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dynsparse._core import native

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONTROLS = {
    "guard": ["read", "write-before", "write-beside", "write-frozen", "wrong-result"],
    "address": ["read", "write-before", "write-beside", "overflow", "wrong-result"],
    "thread": ["race", "race-in-parallel"],
}
ENVIRONMENT = {
    # The OpenMP runtime is not compiled for the sanitizer; Archer speaks for it.
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
    # More threads than cores: those that wait must not spin.
    "OMP_WAIT_POLICY": "passive",
}


def cmake() -> str:
    own = Path(sys.executable).parent / "cmake"
    return str(own) if own.exists() else "cmake"


def build(way: str, folder: Path, targets: list[str], optimize: str) -> None:
    compiler = ["-DCMAKE_CXX_COMPILER=clang++"] if way == "thread" else []
    sanitize = "none" if way == "guard" else way
    options = [f"-DSANITIZE={sanitize}", f"-DOPTIMIZE={optimize}", *compiler]
    jobs = str(min(os.cpu_count() or 1, 8))
    for command in (
        [cmake(), "-S", str(HERE), "-B", str(folder), *options],
        [cmake(), "--build", str(folder), "--parallel", jobs, "--target", "driver", *targets],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{way}: the build failed\n{done.stdout}\n{done.stderr}")


def drive(driver: Path, *arguments: str, limit: float = 120, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(driver), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=limit,
        env={**os.environ, **ENVIRONMENT, **environment},
    )
    return done.returncode, done.stdout + done.stderr


def missing_for_threads() -> str | None:
    """Return what the thread sanitizer needs and this machine lacks."""
    if shutil.which("clang++") is None:
        return "clang++"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        source = program.with_suffix(".cpp")
        source.write_text("#include <omp.h>\nint main() {\n#pragma omp parallel\n  {}\n}\n")
        flags = ["-fopenmp", "-fsanitize=thread", str(source), "-o", str(program)]
        done = subprocess.run(["clang++", *flags], capture_output=True, check=False)
        if done.returncode:
            return "OpenMP or thread sanitizer for clang++"
        _, output = drive(program, ARCHER_OPTIONS="verbose=1")
    return None if "Archer detected" in output else "Archer (libarcher.so)"


def units(isa: str) -> list[str]:
    """Return the values of DYNSPARSE_BF16_UNIT that differ on this machine."""
    return ["", "1", "0"] if isa == "v4" else [""]


def go(way: str, isas: list[str], seconds: float, seed: int, folder: Path, optimize: str) -> int:
    """Run cases and return their number; raise SystemExit at the first finding."""
    where = folder / f"{way}{optimize}"
    targets = [] if way == "guard" else [f"dynsparse_{isa}" for isa in isas]
    build(way, where, targets, optimize)
    driver = where / "driver"
    controls = CONTROLS[way] + (["masked"] if way == "guard" and "v4" in isas else [])
    for control in controls:
        status, output = drive(driver, "--control", control)
        if status == 0:
            raise SystemExit(f"{way}: control {control} was not noticed\n{output}")
        print(f"{way}: control {control} noticed", flush=True)
    cases = 0
    runs = [(isa, callers, unit) for isa in isas for callers in (1, 3) for unit in units(isa)]
    for isa, callers, unit in runs:
        sanitized = where / "csrc" / f"libdynsparse_{isa}.so"
        library = native._library_path(isa) if way == "guard" else sanitized
        share = seconds / len(runs)
        status, output = drive(
            driver,
            *(str(library), "--seconds", str(share)),
            *("--seed", str(seed + callers), "--callers", str(callers)),
            limit=10 * share + 300,
            DYNSPARSE_BF16_UNIT=unit,
        )
        found = re.search(r"^(\d+) cases", output, flags=re.MULTILINE)
        if status or not found:
            raise SystemExit(
                f"{way} {isa}, {callers} callers, unit {unit!r}, seed {seed}:\n{output}"
            )
        cases += int(found.group(1))
        print(f"{way} {isa}: {output.strip()}", flush=True)
    print(f"{way}: {cases} cases, no finding", flush=True)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=list(CONTROLS), choices=list(CONTROLS))
    parser.add_argument("--seconds", type=float, default=60, help="of driving, for each way")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "sanitize")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    all_isas = [isa for isa in native.supported_isas() if isa in native._built_isas()]
    if not all_isas:
        raise SystemExit("no compiled kernels: make native")
    total = 0
    for way in options.ways:
        missing = missing_for_threads() if way == "thread" else None
        if missing:
            print(f"thread: left out, there is no {missing}", flush=True)
            continue
        isas = all_isas[-1:] if options.quick and way != "guard" else all_isas
        optimize = "-O0" if options.quick else "-O1"
        total += go(way, isas, options.seconds, options.seed, options.folder, optimize)
    print(f"{total} cases in all, seed {options.seed}")


if __name__ == "__main__":
    main()
