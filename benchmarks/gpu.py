"""Everything worth measuring on a GPU: first whether it is right, then how fast.

    python3 benchmarks/gpu.py --smoke                   # is every kernel right? 60 to 90 seconds
    python3 benchmarks/gpu.py                           # all sections
    python3 benchmarks/gpu.py steps grid                # some of them
    python3 benchmarks/gpu.py training --tokens train.bin
    compute-sanitizer --target-processes all python3 benchmarks/gpu.py --smoke --small --limit 500
    python3 benchmarks/gpu.py --dry                     # all of it small, on a CPU: does it run?

Works from a checkout with torch, Triton, NumPy and SciPy: nothing is installed, and no compiled CPU
kernels are needed. Each section is a process of its own, so that a kernel which breaks the device
or never ends costs its own section alone. The results file, `--out` or in $OUT, is whole after
every section. Data are random; times are medians of calls in turn, the cache cold, with what nine
and one of ten calls exceed. Exit status 1 where a result was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
os.environ.setdefault("DYNSPARSE_ISA", "none")  # nothing here computes on the CPU
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "dynsparse-triton"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help="names of sections; without, all")
    folder = Path(os.environ.get("OUT", tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=folder / "gpu.json", help="JSON of the results")
    parser.add_argument("--smoke", action="store_true", help="the sections that check, no times")
    parser.add_argument("--small", action="store_true", help="small cases")
    parser.add_argument("--dry", action="store_true", help="small, on a CPU, kernels interpreted")
    parser.add_argument("--tokens", type=Path, help="uint16 tokens that `training` learns")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a section may take")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def all_sections() -> dict[str, Any]:
    from gpu_parts import kernels, model, smoke, steps

    return {**smoke.SECTIONS, **kernels.SECTIONS, **steps.SECTIONS, **model.SECTIONS}


def describe(dry: bool) -> dict[str, object]:
    import torch
    import triton

    found: dict[str, object] = {
        "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
        "device": "interpreter",
    }  # fmt: skip
    if not dry:
        about = torch.cuda.get_device_properties(0)
        found |= {
            "device": about.name, "capability": [about.major, about.minor],
            "multiprocessors": about.multi_processor_count, "cache": about.L2_cache_size,
        }  # fmt: skip
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit"]
        told = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True)
        found["driver, clock, power limit"] = told.stdout.strip()
    return found


def child(args: argparse.Namespace) -> None:
    """One section, in this process."""
    with ExitStack() as stack:
        if args.dry:
            sys.path.insert(0, str(HERE.parent / "tests" / "ops" / "cuda"))
            import interpreted

            stack.enter_context(interpreted.kernels())
        import torch
        from gpu_parts.run import Run

        device = torch.device("cpu" if args.dry else "cuda")
        torch.manual_seed(0)
        run = Run(device, args.small or args.dry, args.out, args.limit, args.tokens)
        all_sections()[args.sections[0]](run)
        run.write()


def measure(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Sections one after the other; those that check nothing but results beside each other."""
    results: dict[str, Any] = {"about": describe(args.dry), "sections": {}}
    print(results["about"], flush=True)
    running = {}
    with tempfile.TemporaryDirectory() as folder:
        parts = {name: Path(folder) / f"{name.replace(' ', '-')}.json" for name in names}
        for name in names:
            if name.startswith("smoke"):
                running[name] = start(args, name, parts[name])
        try:
            for name in names:
                if name not in running:
                    running[name] = start(args, name, parts[name])
                process, begin = running[name]
                ended = "interrupted"
                try:
                    process.wait(timeout=max(1.0, begin + args.limit - time.time()))
                    code = process.returncode
                    ended = f"exit status {code}" if code else "well"
                except subprocess.TimeoutExpired:
                    ended = f"not within {args.limit:g} s"
                finally:
                    stop(process)
                    seconds = round(time.time() - begin, 1)
                    found: dict[str, Any] = {"wrong": []}
                    if parts[name].exists():
                        found = json.loads(parts[name].read_text())
                    if ended != "well":
                        found["wrong"].append(f"{name}: {ended}")
                    results["sections"][name] = {"ended": ended, "seconds": seconds, **found}
                    args.out.write_text(json.dumps(results, indent=1))
                    print(f"-- {name}: {ended}, {seconds} s", flush=True)
        finally:
            for process, _ in running.values():
                stop(process)
    return results


def stop(process: subprocess.Popen) -> None:
    """A section that still runs, and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def start(args: argparse.Namespace, name: str, out: Path) -> tuple[subprocess.Popen, float]:
    command = [sys.executable, __file__, name, "--child", "--out", str(out)]
    command += ["--limit", str(args.limit)]
    command += ["--tokens", str(args.tokens)] if args.tokens else []
    command += ["--small"] * args.small + ["--dry"] * args.dry
    return subprocess.Popen(command, start_new_session=True), time.time()


def main() -> int:
    args = arguments()
    if args.child:
        child(args)
        return 0
    if find_spec("triton") is None:
        print("gpu.py: expected Triton, found none: pip install triton")
        return 2
    if not args.dry:
        import torch

        if not torch.cuda.is_available():
            print("gpu.py: expected a CUDA device, found none: --dry runs on a CPU")
            return 2
    known = list(all_sections())
    unknown = [name for name in args.sections if name not in known]
    if unknown:
        print(f"gpu.py: expected sections of {', '.join(known)}, got {', '.join(unknown)}")
        return 2
    names = [name for name in known if not args.sections or name in args.sections]
    if args.smoke:
        names = [name for name in names if name.startswith("smoke")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as `timeout` ends it
    results = measure(args, names)
    wrong = [what for section in results["sections"].values() for what in section["wrong"]]
    print(f"wrong: {len(wrong)} {'; '.join(wrong)}\nwritten to {args.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
