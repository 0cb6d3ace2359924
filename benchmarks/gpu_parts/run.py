"""The context of a benchmark section: a timer, and rows that are saved as they come."""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Call = Callable[[], object]
T = TypeVar("T")

# Bytes overwritten before each call: more than any L2 cache, and time for the host to run ahead.
_FLUSHED = 512 << 20


class Run:
    """One section.

    Attributes:
        device: the device that computes; the CPU if kernels are interpreted.
        small: small sizes, to check that everything runs.
        tokens: a file of tokens to train on, or None.
        sizes: features, samples and density of the main layer.
        state: the results so far, as in `out`. If `out` exists, an earlier process of this section
            ended early, and this one continues without the cases that failed.
    """

    def __init__(
        self,
        device: torch.device,
        small: bool,
        out: Path,
        seconds: float = 1e9,
        tokens: Path | None = None,
    ) -> None:
        self.device, self.small, self.out, self.tokens = device, small, out, tokens
        self.interpreted = device.type == "cpu"
        self.sizes = (256, 64, 0.3) if small else (4096, 8192, 0.1)
        self.state: dict[str, Any] = {"rows": [], "wrong": [], "trying": None}
        if out.exists():
            self.state = json.loads(out.read_text())
            if self.state["trying"] not in (None, *self.state["wrong"]):
                self.state["wrong"].append(self.state["trying"])
            self.state["trying"] = None
        self._without = frozenset(self.state["wrong"])
        self._end = time.time() + seconds
        self._flush: Tensor | None = None

    def left(self) -> float:
        """Seconds until the section has to end."""
        return self._end - time.time()

    # ---- time ----

    def times(self, calls: dict[str, Call], seconds: float = 0.25) -> dict[str, float]:
        """Median microseconds of each call, all calls in turn, with a cold cache. A failing call is
        reported and left out."""
        return {name: statistics.median(t) for name, t in self.all_times(calls, seconds).items()}

    def all_times(self, calls: dict[str, Call], seconds: float = 0.25) -> dict[str, list[float]]:
        """As `times`, with all times of each call."""
        working: dict[str, Call] = {}
        for name, call in calls.items():
            try:
                call()
                self.wait()
                working[name] = call
            except Exception as problem:
                self.wrong(name, problem)
                self.wait()  # raises if this process has lost the device
        if self.interpreted:
            return {name: [1.0] for name in working}
        once = {name: max(self._between({name: call}, 3)[name]) for name, call in working.items()}
        whole = sum(once.values()) + 150 * len(once)
        rounds = int(min(100, max(12, seconds * 1e6 / max(1.0, whole))))
        return self._between(working, rounds)

    def _between(self, calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
        if self._flush is None:
            self._flush = torch.empty(_FLUSHED, dtype=torch.int8, device=self.device)
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._flush.zero_()
                start.record()
                call()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {n: [s.elapsed_time(e) * 1e3 for s, e in pairs] for n, pairs in events.items()}

    def host(self, call: Call, rounds: int = 200) -> float:
        """Host microseconds of one call, without waiting for the device."""
        rounds = 2 if self.small else rounds
        call()
        self.wait()
        begin = time.perf_counter()
        for _ in range(rounds):
            call()
        taken = time.perf_counter() - begin
        self.wait()
        return taken / rounds * 1e6

    def profile(self, call: Call, rounds: int = 5, most: int = 15) -> list[str]:
        """The Python functions with the most host time, with the microseconds of each in one call,
        without those of functions it calls."""
        rounds = 1 if self.small else rounds
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(rounds):
            call()
        profiler.disable()
        self.wait()
        stats: dict = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        found = sorted(stats.items(), key=lambda item: -item[1][2])[:most]
        return [
            f"{1e6 * own / rounds:.0f} {Path(file).name}:{line} {name} x {calls // rounds}"
            for (file, line, name), (_, calls, own, *_) in found
        ]

    def wall(self, call: Call, rounds: int = 20) -> float:
        """Microseconds from start to end, including the device."""
        rounds = 1 if self.small else rounds
        call()
        times = []
        for _ in range(rounds):
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times)

    def peak(self, call: Call) -> int:
        """Peak device bytes that a call allocates."""
        if self.interpreted:
            call()
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def wait(self) -> None:
        if not self.interpreted:
            torch.cuda.synchronize()

    # ---- results ----

    def case(self, name: str, call: Callable[[], T]) -> T | None:
        """Run `call` and wait for the device; return its result, None if it fails or failed in an
        earlier process of this section. Ends this process if it has lost the device."""
        if name in self._without:
            return None
        self.state["trying"] = name
        self.write()  # in case the call ends the process
        found = None
        try:
            found = call()
            self.wait()
        except Exception as problem:
            self.wrong(name, problem)
            self.wait()  # raises if the device is lost
        self.state["trying"] = None
        return found

    def note(self, what: str, **figures: object) -> None:
        """Print and save one row."""
        self.state["rows"].append({"what": what, **figures})
        text = "  ".join(f"{name.replace('_', ' ')} {_short(f)}" for name, f in figures.items())
        print(f"{what:<56} {text}", flush=True)
        self.write()

    def wrong(self, what: str, problem: BaseException) -> None:
        """Print a failure in one line; save its traceback to the file."""
        line = (str(problem).strip().splitlines() or [""])[0]
        print(f"!! {what}: {type(problem).__name__}: {line[:160]}", flush=True)
        tail = "".join(traceback.format_exception(problem))[-1500:]
        self.state["wrong"].append(what)
        self.state.setdefault("problems", []).append({"what": what, "trace": tail})
        self.write()

    def write(self) -> None:
        """Write the file atomically."""
        beside = self.out.with_name(self.out.name + ".part")
        beside.write_text(json.dumps(self.state, indent=1, default=str))
        os.replace(beside, self.out)


def spread(times: list[float]) -> dict[str, float]:
    """The median, and the 10th and 90th percentiles."""
    ordered = sorted(times)
    return {
        "us": statistics.median(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[-1 - len(ordered) // 10],
    }


def _short(figure: object) -> str:
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)
