"""Run the tests that depend on the processor as other machines would.

    python tests/every_machine.py [arguments for pytest]

Once without compiled kernels; the tests of kernels with each instruction set that this processor
has but the best, which every other run takes, and with four threads while a process spins on each
core. Exit status 1 where a run failed. Instruction sets that the processor lacks are named.
"""

import multiprocessing
import os
import platform
import subprocess
import sys
from pathlib import Path

from dynsparse._core import native

THREADED = [
    *map(str, sorted(Path("tests/ops").glob("test_cpu_*.py"))),
    *(f"tests/ops/test_grow_{name}.py" for name in ("kernels", "random", "screen", "topk")),
    *(f"tests/ops/test_{name}.py" for name in ("int8", "linear_operator", "sparse_input")),
    "tests/ops/test_sparse_embedding_operator.py", "tests/test_index_arrays.py",
]  # fmt: skip
KERNELS = [
    *map(str, sorted(Path("tests/ops").glob("test_*.py"))), "tests/test_index_arrays.py",
    "tests/_core/test_native.py", "tests/csrc", "tests/ops/block_sparse", "tests/selfcheck",
]  # fmt: skip
LAYERS = ["tests/bench/test_bench_run.py", "tests/nn", "tests/popsparse/test_poptorch.py"]


def spin() -> None:
    while True:
        pass


def run(name: str, tests: list[str], **environment: str) -> bool:
    print(f"\n== {name}", flush=True)
    command = [sys.executable, "-m", "pytest", *tests, *sys.argv[1:]]
    return subprocess.run(command, env=os.environ | environment, check=False).returncode == 0


def main() -> int:
    own = native.describe()["available"]
    passed = {
        isa: run(isa, tests, DYNSPARSE_ISA=isa, OMP_NUM_THREADS="1")
        for isa, tests in {"none": KERNELS + LAYERS, **dict.fromkeys(own[1:], KERNELS)}.items()
    }
    spinning = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count())]
    for process in spinning:
        process.start()
    busy = "four threads on busy cores"
    passed[busy] = run(busy, THREADED, OMP_NUM_THREADS="4")
    for process in spinning:
        process.kill()
    print()
    for name, well in passed.items():
        print(f"{name}: {'passed' if well else 'FAILED'}")
    known = ["v2", "v3", "v4"] if platform.machine() in ("x86_64", "AMD64") else ["neon"]
    if missing := [isa for isa in known if isa not in own]:
        print(f"not covered by this machine: {', '.join(missing)}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
