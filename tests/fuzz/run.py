"""Fuzz readers: `python tests/fuzz/run.py [TARGET ...] [--seconds S] [--engine atheris|mutate]`.

Each target runs in a separate process with bounded memory, one after another, and continues from
the corpus of its last run in build/fuzz/TARGET. Findings are written there, too: after the fix,
copy them to tests/fuzz/corpus/TARGET, which every test run replays.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from targets import NAMES  # noqa: E402

_BUILD = HERE.parents[1] / "build" / "fuzz"
_LONGEST = 20_000
_MEMORY = 3 << 30  # beside what torch maps
_INSTRUMENTED = ["dynsparse", "yaml"]
os.environ.setdefault("DYNSPARSE_READ_LIMIT", str(1 << 20))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(NAMES)}; all when left out")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--engine", choices=("atheris", "mutate"), default=_engine())
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.targets) - set(NAMES):
        parser.error(f"expected targets of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    if options.here:
        fuzz = _atheris if options.engine == "atheris" else _mutate
        return fuzz(options.targets[0], options.seconds)
    failed = []
    for name in options.targets or NAMES:
        command = [sys.executable, __file__, name, "--here", "--engine", options.engine]
        if subprocess.run([*command, "--seconds", str(options.seconds)], check=False).returncode:
            failed.append(name)
    print(f"findings: {', '.join(failed) or 'none'}")
    return len(failed)


def _engine() -> str:
    return "atheris" if importlib.util.find_spec("atheris") else "mutate"


def _bound_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY, mapped + _MEMORY))


def _corpus(name: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted((HERE / "corpus" / name).glob("*"))]


def _atheris(name: str, seconds: int) -> int:
    import atheris
    import torch  # noqa: F401  # before: to instrument all of it takes minutes

    with atheris.instrument_imports(include=_INSTRUMENTED):
        target = importlib.import_module(f"targets.{name}")
    place = _BUILD / name
    (place / "corpus").mkdir(parents=True, exist_ok=True)
    (place / "seeds").mkdir(exist_ok=True)
    for number, seed in enumerate(target.SEEDS + _corpus(name)):
        (place / "seeds" / str(number)).write_bytes(seed)
    _bound_memory()
    print(f"== {name}", flush=True)
    atheris.Setup(
        [
            name,
            f"-max_total_time={seconds}",
            f"-max_len={_LONGEST}",
            "-timeout=30",
            "-rss_limit_mb=4096",
            "-print_final_stats=1",
            f"-artifact_prefix={place}/finding-",
            str(place / "corpus"),
            str(place / "seeds"),
        ],
        target.run,
    )
    atheris.Fuzz()  # ends the process
    return 0


def _mutate(name: str, seconds: int) -> int:
    from mutate import mutate

    target = importlib.import_module(f"targets.{name}")
    _bound_memory()
    seeds = target.SEEDS + _corpus(name)
    chance = random.Random(time.time_ns())
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutate(chance, chance.choice(seeds), seeds)
        count += 1
        try:
            target.run(data)
        except BaseException:
            (_BUILD / name).mkdir(parents=True, exist_ok=True)
            file = _BUILD / name / f"finding-{count}"
            file.write_bytes(data)
            print(f"{name}: a finding after {count:,} executions: {file}", flush=True)
            raise
    print(f"{name}: {count:,} executions without a finding", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
