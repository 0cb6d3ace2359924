"""Everything worth measuring on a GPU, most important first, inside a budget of time.

    python3 benchmarks/gpu.py --out results.json           # on a GPU; at most ten minutes
    python3 benchmarks/gpu.py --dry                        # tiny, on a CPU: does it run?

Works from a checkout: nothing is installed, no compiled CPU kernels are needed; torch, Triton,
NumPy and SciPy are. Sections run in order of importance until the budget is spent: ceilings of the
chip, whether every kernel is right, all candidates of the kernels over blocks, whole steps eager
and captured, float32, the dense way, growth and updates, graphs and memory, a transformer, whole
trainings, other sizes, and what time is left goes to neighbours of the best. Data are random, times
medians of calls in turn with a cold cache. Kernels are compiled by several processes before
anything is timed.

What was expected before is printed beside each figure (`gpu_parts/predictions.py`). The file is
whole at any moment, and an error ends its section only. Where one has broken the device for this
process, or nothing has ended for a while, another process goes on without what did that. Exit
status 1 where a result was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
os.environ.setdefault("DYNSPARSE_ISA", "none")  # nothing here computes on the CPU
os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "dynsparse-triton"))

# Seconds without anything that ends, compiling a kernel included.
_PATIENCE = 90


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the results; without, in /tmp")
    parser.add_argument("--budget", type=float, default=540, help="seconds, compiling included")
    parser.add_argument("--dry", action="store_true", help="small, on a CPU, kernels interpreted")
    parser.add_argument("--only", nargs="*", default=[], help="names of sections")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out is None and not args.dry:
        args.out = Path(tempfile.gettempdir()) / "dynsparse-gpu.json"
    return args


def sections(run: Any) -> dict[str, Callable[[], None]]:
    """By importance."""
    from gpu_parts import (
        ceilings,
        checks,
        dense_way,
        graphs,
        grid,
        growth,
        kernels,
        layers,
        memory,
        training,
    )

    return {
        "ceilings": lambda: ceilings.measure(run),
        "correctness": lambda: checks.check(run),
        **{f"blocks {b}": lambda b=b: kernels.measure(run, b) for b in kernels.ORDER},
        "steps": lambda: layers.steps(run),
        "float32": lambda: kernels.float32(run),
        "dense way": lambda: dense_way.measure(run),
        "growth": lambda: growth.scores(run),
        "updates": lambda: growth.updates(run),
        "graphs": lambda: graphs.measure(run),
        "memory": lambda: memory.measure(run),
        "transformer": lambda: layers.transformer(run),
        "training": lambda: training.measure(run),
        "grid": lambda: grid.measure(run, 0.75),
        "refine": lambda: kernels.refine(run),
    }


def compile_all(args: argparse.Namespace) -> None:
    """Workers launch every kernel once; what they compile is found in Triton's cache."""
    begin = time.time()
    command = [sys.executable, __file__, "--workers", str(args.workers), "--worker"]
    running = [subprocess.Popen([*command, str(i)]) for i in range(args.workers)]
    for process in running:
        try:
            process.wait(timeout=max(1.0, begin + args.budget / 4 - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()  # what it leaves is compiled when it is first needed
    print(f"compiled by {args.workers} processes in {time.time() - begin:.0f} s", flush=True)


def worker(args: argparse.Namespace, run: Any) -> None:
    from gpu_parts import checks, kernels

    jobs = [lambda case=case: checks.one(run, *case) for case in checks.cases(run).values()]
    for i, job in enumerate([*kernels.jobs(run), *jobs]):
        if i % args.workers == args.worker:
            try:
                job()
            except Exception as problem:  # told where it is measured
                print(f"job {i}: {type(problem).__name__}", flush=True)
    run.wait()


def goes_on(run: Any) -> bool:
    """Whether this process can still use the device."""
    try:
        run.wait()
    except Exception:
        return False
    return True


def again(args: argparse.Namespace, run: Any, done: list[str]) -> None:
    """A new process does the rest: the device is lost to this one. The section at hand is done
    again without what did that, if that is known."""
    trying = run.state["trying"]
    if trying is not None:
        run.state["skip"].append(trying)
        run.state["trying"] = None
        done = done[:-1]
    run.write()
    command = [sys.executable, __file__, "--budget", str(args.budget), "--began", str(args.began)]
    command += ["--out", str(args.out)]
    command += ["--only", *args.only] if args.only else []
    print(f"the device is lost to this process, by {trying}; another goes on", flush=True)
    os.execv(sys.executable, [*command, "--done", *done])


def watch(args: argparse.Namespace, run: Any, done: list[str]) -> None:
    """Goes on in a new process where a kernel does not end."""
    while True:
        time.sleep(1)
        if time.time() - run.alive > _PATIENCE:
            run.problem("watch", TimeoutError(f"nothing ended for {_PATIENCE} s"))
            again(args, run, done)


def measure(args: argparse.Namespace, run: Any) -> None:
    done = list(args.done or [])
    if not run.dry:
        threading.Thread(target=watch, args=(args, run, done), daemon=True).start()
    for title, section in sections(run).items():
        if title in done or (args.only and title not in args.only):
            continue
        done.append(title)
        run.state["trying"] = None
        begin = time.time()
        told = run.state["sections"][title] = {"ended": "no time"}
        if run.left() > 20 or run.dry:
            try:
                section()
                told["ended"] = "well"
            except Exception as problem:
                told["ended"] = f"{type(problem).__name__}: {str(problem)[:300]}"
                run.problem(title, problem)
        told["seconds"] = round(time.time() - begin, 1)
        run.write()
        print(f"-- {title}: {told['ended']}, {told['seconds']} s", flush=True)
        if not goes_on(run):
            again(args, run, done)


def describe(run: Any) -> dict[str, object]:
    import torch
    import triton

    found: dict[str, object] = {
        "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
        "device": "interpreter",
    }  # fmt: skip
    if not run.dry:
        about = torch.cuda.get_device_properties(0)
        found |= {
            "device": about.name, "capability": [about.major, about.minor],
            "multiprocessors": about.multi_processor_count, "cache": about.L2_cache_size,
        }  # fmt: skip
    return found


def summary(args: argparse.Namespace, run: Any) -> None:
    """The row of `cuda/rates.py` as measured, the best candidates, and what was wrong; the results
    as a page of tables beside the file."""
    from gpu_parts import ceilings, tables

    best = run.state["best"]
    reached = [kept["share"] for key, kept in best.items() if not key.startswith("16 ")]
    row = ceilings.rates(run)
    if reached and not run.dry:
        share = {**row.share, "16-bit": round(statistics.median(reached), 2)}
        row = row._replace(measured=True, source=f"gpu.py on {run.state['about']}", share=share)
    run.state["rates"] = row._asdict()
    print(f"for cuda/rates.py: {row}")
    for key, kept in best.items():
        print(f"best {key}: {kept['us']:.1f} us, {kept['ratio']:.2f}x dense, "
              f"{100 * kept['share']:.0f} % of bound, {kept['config']}")  # fmt: skip
    print(f"wrong results: {run.state.get('wrong', 'not looked at')}; "
          f"problems: {len(run.state.get('problems', []))}")  # fmt: skip
    run.write()
    if args.out is not None:
        page = args.out.with_suffix(".md")
        page.write_text(tables.measured(run.state) + "\n")
        print(f"written to {args.out} and, as tables, to {page}")


def main() -> int:
    args = arguments()
    if not args.dry:
        import torch

        if not torch.cuda.is_available():
            print("gpu.py: expected a CUDA device, found none: --dry runs on a CPU")
            return 2
    with ExitStack() as stack:
        if args.dry:
            sys.path.insert(0, str(HERE.parent / "tests" / "ops" / "cuda"))
            import interpreted

            stack.enter_context(interpreted.kernels())
        from gpu_parts import ceilings
        from gpu_parts.run import Run

        run = Run(args.dry, args.budget, args.out, args.began)
        if args.dry:
            ceilings.interpret()
        if args.worker >= 0:
            worker(args, run)
            return 0
        if args.done is not None:
            run.state.update(json.loads(args.out.read_text()))
        elif not args.dry:
            compile_all(args)
        run.state["about"] = describe(run)
        print(run.state["about"], flush=True)
        measure(args, run)
        summary(args, run)
    return 1 if run.state.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
