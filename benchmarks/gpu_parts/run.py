"""One run of the benchmark: its clock, its timer, and its results, which are kept as they come."""

from __future__ import annotations

import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]

# Written over before each call: more than any L2 cache holds, and time for the host to run ahead.
_FLUSHED = 512 << 20


class Run:
    """What all sections share.

    Attributes:
        dry: small sizes on the CPU, kernels interpreted: whether everything runs, not how fast.
        sizes: features, samples and density of the main layer.
        state: everything found so far; what `--out` holds.
        alive: when something last went on.
    """

    def __init__(self, dry: bool, budget: float, out: Path | None, began: float) -> None:
        self.dry, self.budget, self.out, self.began = dry, budget, out, began
        self.device = torch.device("cpu" if dry else "cuda")
        self.sizes = (256, 64, 0.3) if dry else (4096, 8192, 0.1)
        self.state: dict[str, Any] = {
            "rows": [], "sections": {}, "best": {}, "measured": {}, "trying": None, "skip": [],
        }  # fmt: skip
        self.alive = time.time()
        self._flush: Tensor | None = None

    def left(self, share: float = 1.0) -> float:
        """Seconds until `share` of the budget is spent."""
        return self.began + share * self.budget - time.time()

    def tries(self, what: str) -> bool:
        """Says beforehand what may break the device or never end. False where it did before."""
        if what in self.state["skip"]:
            return False
        self.state["trying"] = what
        self.write()
        return True

    # ---- time ----

    def times(self, calls: dict[str, Call], seconds: float = 0.25) -> dict[str, float]:
        """Microseconds of each call: medians, all calls in turn, the cache cold. A call that fails
        is left out, and told."""
        working: dict[str, Call] = {}
        for name, call in calls.items():
            self.alive = time.time()
            try:
                call()
                self.wait()
                working[name] = call
            except Exception as problem:
                self.problem(name, problem)
        if self.dry:
            return {name: self._wall(call) for name, call in working.items()}
        once = {name: max(self._between({name: call}, 3)[name]) for name, call in working.items()}
        whole = sum(once.values()) + 150 * len(once)
        rounds = int(min(100, max(12, seconds * 1e6 / max(1.0, whole))))
        found = self._between(working, rounds)
        return {name: statistics.median(times) for name, times in found.items()}

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

    def _wall(self, call: Call) -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    def host(self, call: Call, rounds: int = 200) -> float:
        """Microseconds of the host for one call, the device left to itself."""
        rounds = 2 if self.dry else rounds
        call()
        self.wait()
        begin = time.perf_counter()
        for _ in range(rounds):
            call()
        taken = time.perf_counter() - begin
        self.wait()
        return taken / rounds * 1e6

    def wall(self, call: Call, rounds: int = 20) -> float:
        """Microseconds from start to end, as a training waits for them."""
        rounds = 1 if self.dry else rounds
        call()
        times = []
        for _ in range(rounds):
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times)

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    # ---- results ----

    def note(
        self,
        section: str,
        what: str,
        us: float | None = None,
        *,
        dense: float | None = None,
        bound: float | None = None,
        expected: float | None = None,
        wanted: float | None = None,
        **more: object,
    ) -> None:
        """One row: microseconds, and beside them those of dense, of the bound, and expected before;
        `wanted` is the least ratio to dense."""
        if self.dry:  # what is expected is expected of a GPU
            expected = wanted = None
        row: dict[str, object] = {"section": section, "what": what}
        text = f"{section:<12} {what:<60}"
        if us is not None:
            row["us"] = round(us, 2)
            text += f" {us:>10.1f} us"
        if us and dense:
            row |= {"dense_us": round(dense, 2), "ratio": round(dense / us, 3)}
            text += f" {dense / us:>6.2f}x dense"
        if us and bound:
            row |= {"bound_us": round(bound, 2), "share": round(bound / us, 3)}
            text += f" {100 * bound / us:>4.0f} % of bound"
        if expected is not None:
            row["expected"] = expected
            text += f"  (expected {expected:g})"
        if wanted is not None:
            row["wanted"] = wanted
            text += f"  (wanted {wanted:g}x)"
        for name, value in more.items():
            row[name] = value
            text += f"  {name.replace('_', ' ')} {value}"
        self.state["rows"].append(row)
        print(text, flush=True)
        self.write()

    def problem(self, what: str, problem: BaseException) -> None:
        """What went wrong, in one line here and whole in the file."""
        line = (str(problem).strip().splitlines() or [""])[0]
        print(f"!! {what}: {type(problem).__name__}: {line[:160]}", flush=True)
        tail = "".join(traceback.format_exception(problem))[-1500:]
        self.state.setdefault("problems", []).append({"what": what, "trace": tail})
        self.write()

    def write(self) -> None:
        """The file is whole at any moment."""
        self.alive = time.time()
        if self.out is not None:
            beside = self.out.with_name(self.out.name + ".part")
            beside.write_text(json.dumps(self.state, indent=1, default=str))
            os.replace(beside, self.out)
