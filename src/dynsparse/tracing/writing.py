"""`trace`: from spans to a file in the Chrome trace format.

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

from dynsparse.checks import check_integer, check_kind
from dynsparse.files.atomic_write import atomic_write
from dynsparse.interrupts import uninterrupted
from dynsparse.tracing.models import hooked
from dynsparse.tracing.recorder import Lane, Mark, Recorder
from dynsparse.tracing.spans import current, record
from dynsparse.typed import typed
from dynsparse.version import __version__

_log = logging.getLogger(__name__)

_LIMIT = 1_000_000
_PART = 10_000  # events that are written at once


@typed
@contextmanager
def trace(file: str | os.PathLike[str], *, limit: int = _LIMIT) -> Iterator[None]:
    """Write the spans and counters of what happens inside to `file`, in the Chrome trace format.

    Open the file at https://ui.perfetto.dev or chrome://tracing. A training has the spans
    "forward", "backward", "optimizer", "update" with "drop", "grow", "rewire" and "encode" inside,
    "checkpoint" and more (see the guide), and the counters "density" and "churn"; `span` and
    `counter` add others. Times are the host's: work that a device does later is not in them.

    The file is written when the block ends, after an error and Ctrl-C, too, and appears whole or
    not at all. Each of several ranks writes a file of its own: the first one `file`, rank 1
    "run.rank1.json" beside "run.json", and so on. Their times are of one clock where they run on
    one machine.

    Args:
        file: in a folder that exists.
        limit: how many spans and counters of each thread are kept, the last ones, at some 150 bytes
            of memory each.

    Raises:
        TypeError: a file that is no path.
        ValueError: a trace is on already; a file in no folder that can be written.
        OSError: the file cannot be written.

    >>> import dynsparse as ds, tempfile
    >>> with ds.trace(tempfile.mkdtemp() + "/run.json"):
    ...     pass
    """
    limit = check_integer("limit", limit, 1)
    check_kind("file", file, (str, os.PathLike), "a path")
    path = file_of(Path(file), rank_here())
    check_place(path)
    if current() is not None:
        raise ValueError("a trace is on already: let one end before the next begins")
    recorder = Recorder.started(limit)
    record(recorder)
    try:
        with hooked():
            yield
    finally:
        record(None)
        with uninterrupted():
            _write(path, recorder, time.perf_counter_ns())


def check_place(path: Path) -> None:
    """Raise ValueError for a file that cannot be written, before there is anything to write."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"expected a file in a folder that can be written, got {path}")


def rank_here() -> int:
    """This process's rank, also before its group is made; 0 where there is only one."""
    distributed = torch.distributed
    if not distributed.is_available():
        return 0
    if distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0")) if distributed.is_torchelastic_launched() else 0


def file_of(path: Path, rank: int) -> Path:
    """Where a rank writes that is told to write to `path`."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def _write(path: Path, recorder: Recorder, end: int) -> None:
    pid, rank = os.getpid(), rank_here()
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
        for part in _parts(recorder, pid, rank):
            file.write((b"" if first else b",\n") + ",\n".join(part).encode())
            first = False
        file.write(b"\n]}\n")

    atomic_write(path, write)
    _log.info("wrote the trace %s", path)


def _parts(recorder: Recorder, pid: int, rank: int) -> Iterator[list[str]]:
    """The events as JSON, some thousands at a time; never none."""
    yield [
        _metadata("process_name", f"dynsparse, rank {rank}", pid, 0, recorder.begin),
        *(_metadata("thread_name", one.name, pid, one.thread, recorder.begin)
          for one in recorder.lanes),
    ]  # fmt: skip
    for lane in recorder.lanes:
        # Outer spans before those inside them, as simple readers expect.
        marks = sorted(lane.marks, key=lambda mark: (mark[1], -(mark[2] or mark[1])))
        for start in range(0, len(marks), _PART):
            yield [_event(mark, lane, pid) for mark in marks[start : start + _PART]]


def _metadata(name: str, value: str, pid: int, thread: int, begin: int) -> str:
    event = {"ph": "M", "name": name, "ts": begin / 1000, "pid": pid, "tid": thread}
    return json.dumps({**event, "args": {"name": value}})


def _event(mark: Mark, lane: Lane, pid: int) -> str:
    title, begin, end, about = mark
    at = f'"ts":{_microseconds(begin)},"pid":{pid},"tid":{lane.thread}'
    name = json.dumps(str(title))
    if end is None:
        return f'{{"ph":"C","cat":"dynsparse","name":{name},{at},"args":{{{name}:{about!r}}}}}'
    more = f',"args":{json.dumps(_plain(about))}' if about else ""
    length = _microseconds(end - begin)
    return f'{{"ph":"X","cat":"dynsparse","name":{name},{at},"dur":{length}{more}}}'


def _microseconds(time: int) -> str:
    """To the nanosecond, which a float of so long a time would round."""
    return f"{time // 1000}.{time % 1000:03d}"


def _plain(about: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold."""

    def fits(value: Any) -> bool:
        return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))

    return {name: value if fits(value) else str(value) for name, value in about.items()}
