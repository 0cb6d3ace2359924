"""What the cache on the disk spares a second process: plans of the tile machine, their programs.

    python benchmarks/plan_cache.py

Each case is done by two processes, one after the other, with an empty cache for the first. Seconds
are those that the process computed (CPU time), the least of several pairs, without Python's start
and imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

BATCH, DENSITY = 256, 1 / 16


def planned(size: int, block: int, passes: str) -> Callable[[], object]:
    from dynsparse import popsparse
    from dynsparse.machine import Target

    target = Target.mk2()
    return lambda: popsparse.plan(size, size, BATCH, DENSITY, block, target=target, passes=passes)


def built(size: int, block: int, passes: str) -> Callable[[], object]:
    from dynsparse import popsparse

    plan = planned(size, block, passes)
    return lambda: popsparse.Layer(plan(), numerics=False)


def dense(size: int) -> Callable[[], object]:
    from dynsparse.machine import Target
    from dynsparse.popsparse.dense import plan

    return lambda: plan(size, size, BATCH, "float16", Target.mk2())


def static(size: int, block: int) -> Callable[[], object]:
    import torch

    from dynsparse import SparsePattern
    from dynsparse.machine import Target
    from dynsparse.popsparse import static

    generator = torch.Generator().manual_seed(0)
    pattern = SparsePattern.random((size, size), DENSITY, block_size=block, generator=generator)
    params = static.MatmulParams.create_for_sparse_dense(1, size, size, BATCH)
    return lambda: static.make_plan(Target.mk2(), "float16", params, pattern)


ALL = "forward,grad_input,grad_weight"
CASES: dict[str, tuple[Callable[..., Callable[[], object]], tuple[object, ...]]] = {
    "plan, elements, forward": (planned, (4096, 1, "forward")),
    "plan, elements, three passes": (planned, (4096, 1, ALL)),
    "plan, blocks of 16, three passes": (planned, (4096, 16, ALL)),
    "plan, dense": (dense, (4096,)),
    "plan, static, elements": (static, (4096, 1)),
    "plan, static, blocks of 16": (static, (4096, 16)),
    "plan and program, elements, three passes": (built, (4096, 1, ALL)),
    "plan and program, blocks of 16, three passes": (built, (4096, 16, ALL)),
}


def once(name: str) -> None:
    """In a process of its own: do a case, and say how long it took and what the log told."""
    import logging

    import dynsparse  # noqa: F401  which looks what logs the environment asks for

    told: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger = logging.getLogger("dynsparse")
    logger.addHandler(Ear())
    logger.setLevel(logging.INFO)
    make, arguments = CASES[name]
    work = make(*arguments)
    # What the library loads when it first plans belongs to no plan.
    make(*[64 if one == 4096 else one for one in arguments])()
    told.clear()
    begin = time.process_time()
    work()
    print(json.dumps({"seconds": time.process_time() - begin, "told": told}))


def run(name: str, folder: str) -> dict:
    environment = os.environ | {"DYNSPARSE_CACHE_DIR": folder, "DYNSPARSE_LOG_LEVEL": ""}
    environment.pop("DYNSPARSE_CACHE_SIZE", None)
    command = [sys.executable, __file__, "--once", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        once(args.once)
        return
    print(f"{'':46} {'empty':>8} {'warm':>8}  ratio  what the log of the warm one says")
    for name in CASES:
        cold, warm = [], []
        for _ in range(args.pairs):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(run(name, folder))
                warm.append(run(name, folder))
        least = [min(one["seconds"] for one in found) for found in (cold, warm)]
        told = warm[-1]["told"]
        found = sum(" from the cache: " in one for one in told)
        made = sum(one.startswith("planned ") for one in told)
        words = f"{made} planned, {found} from the cache"
        ratio = least[0] / least[1]
        print(f"{name:46} {least[0]:7.3f}s {least[1]:7.3f}s {ratio:6.1f}  {words}", flush=True)


if __name__ == "__main__":
    main()
