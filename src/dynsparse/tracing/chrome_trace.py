"""`trace`, which writes spans and counters to a file in the Chrome trace format.

The format: "Trace Event Format" (Google, 2016), JSON object form: `X` complete events, `C` counters
and `M` metadata; times are microseconds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dynsparse._core.checks import check_integer, check_kind, check_types
from dynsparse._core.files.atomic_write import atomic_write
from dynsparse._core.interrupts import defer_signals
from dynsparse._core.version import __version__
from dynsparse.tracing.models import hook_models
from dynsparse.tracing.spans import Lane, Mark, Recorder, active_recorder, set_recorder

_log = logging.getLogger(__name__)

_LIMIT = 1_000_000
_PART = 10_000  # events per write


@check_types
@contextmanager
def trace(file: str | os.PathLike[str], *, limit: int = _LIMIT) -> Iterator[None]:
    """Write the spans and counters inside the block to `file`, in the Chrome trace format.

    Open the file at https://ui.perfetto.dev or chrome://tracing. A training has the spans
    "forward", "backward", "optimizer", "update" with "drop", "grow" and "rewire" inside, "encode",
    "checkpoint" and more (see the guide), and the counters "density" and "churn"; `span` and
    `counter` add others. Times are the host's, without the work of devices.

    The file is written atomically when the block ends, also after an error and Ctrl-C. Each rank
    writes its own file: the first one `file`, rank 1 "run.rank1.json" beside "run.json", and so
    on. The ranks of one machine share a clock.

    Args:
        file: a file in a folder that exists.
        limit: number of spans and counters of each thread that are kept, the last ones, at about
            150 bytes of memory each.

    Raises:
        TypeError: a file that is not a path.
        ValueError: a trace is active already; a folder that does not exist or cannot be written.
        OSError: the file cannot be written.

    >>> import dynsparse as ds, tempfile
    >>> with ds.trace(tempfile.mkdtemp() + "/run.json"):
    ...     pass
    """
    limit = check_integer("limit", limit, 1)
    check_kind("file", file, (str, os.PathLike), "a path")
    path = rank_path(Path(file), current_rank())
    check_writable(path)
    if active_recorder() is not None:
        raise ValueError("a trace is active already: end it before you begin another")
    recorder = Recorder(limit, [], time.perf_counter_ns())
    set_recorder(recorder)
    try:
        with hook_models():
            yield
    finally:
        set_recorder(None)
        with defer_signals():
            _write(path, recorder, time.perf_counter_ns())


def check_writable(path: Path) -> None:
    """Raise ValueError for a file that cannot be written, before the trace begins."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"expected a file in a folder that can be written, got {path}")


def current_rank() -> int:
    """Return this process's rank, also before its group is made; 0 for a single process."""
    distributed = torch.distributed
    if not distributed.is_available():
        return 0
    if distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0")) if distributed.is_torchelastic_launched() else 0


def rank_path(path: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def _write(path: Path, recorder: Recorder, end: int) -> None:
    pid, rank = os.getpid(), current_rank()
    about = {
        "program": f"dynsparse {__version__}",
        "rank": rank,
        "begin": recorder.begin / 1000,
        "end": end / 1000,
        "whole": not any(lane.is_full for lane in recorder.lanes),
    }
    head = {"displayTimeUnit": "ms", "otherData": about}

    def write(file: BinaryIO) -> None:
        file.write(json.dumps(head)[:-1].encode() + b', "traceEvents": [\n')
        first = True
        for part in _format_events(recorder, pid, rank):
            file.write((b"" if first else b",\n") + ",\n".join(part).encode())
            first = False
        file.write(b"\n]}\n")

    atomic_write(path, write)
    _log.info("wrote the trace %s", path)


def _format_events(recorder: Recorder, pid: int, rank: int) -> Iterator[list[str]]:
    """Yield the events as JSON, in lists of thousands, none of them empty."""
    yield [
        _format_metadata("process_name", f"dynsparse, rank {rank}", pid, 0, recorder.begin),
        *(_format_metadata("thread_name", lane.name, pid, lane.thread, recorder.begin)
          for lane in recorder.lanes),
    ]  # fmt: skip
    for lane in recorder.lanes:
        # Outer spans before inner ones, as simple readers expect.
        marks = sorted(lane.marks, key=lambda mark: (mark[1], -(mark[2] or mark[1])))
        for start in range(0, len(marks), _PART):
            yield [_format_event(mark, lane, pid) for mark in marks[start : start + _PART]]


def _format_metadata(name: str, value: str, pid: int, thread: int, begin: int) -> str:
    event = {"ph": "M", "name": name, "ts": begin / 1000, "pid": pid, "tid": thread}
    return json.dumps({**event, "args": {"name": value}})


def _format_event(mark: Mark, lane: Lane, pid: int) -> str:
    title, begin, end, about = mark
    at = f'"ts":{_microseconds(begin)},"pid":{pid},"tid":{lane.thread}'
    name = json.dumps(str(title))
    if end is None:
        return f'{{"ph":"C","cat":"dynsparse","name":{name},{at},"args":{{{name}:{about!r}}}}}'
    more = f',"args":{json.dumps(_to_json_values(about))}' if about else ""
    length = _microseconds(end - begin)
    return f'{{"ph":"X","cat":"dynsparse","name":{name},{at},"dur":{length}{more}}}'


def _microseconds(time: int) -> str:
    """Format nanoseconds as microseconds, exactly, unlike a float."""
    return f"{time // 1000}.{time % 1000:03d}"


def _to_json_values(about: dict[str, Any]) -> dict[str, Any]:
    """Convert values that JSON cannot hold to text."""

    def is_json(value: Any) -> bool:
        return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))

    return {name: value if is_json(value) else str(value) for name, value in about.items()}
