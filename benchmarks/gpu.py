"""All GPU benchmarks: correctness first, then speed.

    python3 benchmarks/gpu.py --smoke                   # correctness of every kernel, 60 to 90 s
    python3 benchmarks/gpu.py                           # all sections
    python3 benchmarks/gpu.py steps grid                # some of them
    python3 benchmarks/gpu.py training --tokens train.bin
    compute-sanitizer --target-processes all python3 benchmarks/gpu.py --smoke --small --limit 500
    python3 benchmarks/gpu.py --dry                     # small sizes on a CPU: does it run?

Runs from a checkout with torch, Triton, NumPy and SciPy; it installs nothing and needs no compiled
CPU kernels. Each section runs in its own process. If a kernel breaks the device, a new process goes
on without that kernel; a kernel that never ends costs only its own section. The results file,
`--out` or in $OUT, is complete after every section. benchmarks/gpu_run.sh runs it in steps. Data
are random; times are medians over calls in turn with a cold cache, with the 10th and 90th
percentiles. The exit status is 1 if a result was wrong.
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
    parser.add_argument("sections", nargs="*", help="names of sections (default: all)")
    folder = Path(os.environ.get("OUT", tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=folder / "gpu.json", help="JSON of the results")
    parser.add_argument("--smoke", action="store_true", help="only check results, no times")
    parser.add_argument("--small", action="store_true", help="small cases")
    parser.add_argument("--dry", action="store_true", help="small, on a CPU, interpreted kernels")
    parser.add_argument("--tokens", type=Path, help="uint16 tokens for `training`")
    parser.add_argument("--limit", type=float, default=150, help="time limit per section, in s")
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
    """Run one section in this process."""
    section = all_sections()[args.sections[0]]
    with ExitStack() as stack:
        if args.dry:  # replaces the kernels of the modules imported so far
            sys.path.insert(0, str(HERE.parent / "tests" / "ops" / "cuda"))
            import interpreted

            stack.enter_context(interpreted.kernels())
        import torch
        from gpu_parts.run import Run

        device = torch.device("cpu" if args.dry else "cuda")
        torch.manual_seed(0)
        run = Run(device, args.small or args.dry, args.out, args.limit, args.tokens)
        section(run)
        run.write()


class Section:
    """One section in its own process. If the process ends during a case, as when a kernel breaks
    the device, a new process goes on without that case."""

    def __init__(self, args: argparse.Namespace, name: str, out: Path) -> None:
        self.args, self.name, self.out = args, name, out
        self.begin = time.time()
        self.process = self._start()

    def _start(self) -> subprocess.Popen:
        args = self.args
        command = [sys.executable, __file__, self.name, "--child", "--out", str(self.out)]
        command += ["--limit", str(self.begin + args.limit - time.time())]
        command += ["--tokens", str(args.tokens)] if args.tokens else []
        command += ["--small"] * args.small + ["--dry"] * args.dry
        return subprocess.Popen(command, start_new_session=True)

    def stop(self) -> None:
        """Kill the process and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def found(self) -> dict[str, Any]:
        nothing = {"rows": [], "wrong": [], "trying": None}
        return json.loads(self.out.read_text()) if self.out.exists() else nothing

    def wait(self) -> str:
        """Wait for the end; return how it ended."""
        without = -1
        while True:
            try:
                code = self.process.wait(max(1.0, self.begin + self.args.limit - time.time()))
            except subprocess.TimeoutExpired:
                return f"not within {self.args.limit:g} s"
            found = self.found()
            wrong = len({*found["wrong"], found["trying"]})
            if code == 0 or found["trying"] is None or wrong == without:
                return f"exit status {code}" if code else "well"
            without = wrong
            print(f"-- {self.name}: goes on without {found['trying']}", flush=True)
            self.process = self._start()


def measure(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Run sections one after the other; those that only check results run side by side."""
    results: dict[str, Any] = {"about": describe(args.dry), "sections": {}}
    print(results["about"], flush=True)
    with tempfile.TemporaryDirectory() as folder:

        def begin(name: str) -> Section:
            return Section(args, name, Path(folder) / f"{name.replace(' ', '-')}.json")

        running = {name: begin(name) for name in names if name.startswith("smoke")}
        try:
            for name in names:
                if name not in running:
                    running[name] = begin(name)
                section, ended = running[name], "interrupted"
                try:
                    ended = section.wait()
                finally:
                    section.stop()
                    found, seconds = section.found(), round(time.time() - section.begin, 1)
                    if ended != "well":
                        found["wrong"].append(f"{name}: {ended}")
                    results["sections"][name] = {"ended": ended, "seconds": seconds, **found}
                    args.out.write_text(json.dumps(results, indent=1))
                    print(f"-- {name}: {ended}, {seconds} s", flush=True)
        finally:
            for section in running.values():
                section.stop()
    return results


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` sends SIGTERM
    results = measure(args, names)
    wrong = [what for section in results["sections"].values() for what in section["wrong"]]
    print(f"wrong: {len(wrong)} {'; '.join(wrong)}\nwritten to {args.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
