"""Read and validate files in the Chrome trace format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    """Read the file and check every event."""

    def none(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    document = json.loads(path.read_text(), parse_constant=none)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "C", "M"), event
        assert type(event["name"]) is str
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["ts"] > 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "C":
            assert event["args"]
            assert all(type(v) is float and math.isfinite(v) for v in event["args"].values())
        else:
            assert event["name"] in ("process_name", "thread_name")
            assert type(event["args"]["name"]) is str
    check_nesting(document)
    return document


def check_nesting(document: dict[str, Any]) -> None:
    """Check that spans of a thread are nested or disjoint, and that outer ones come first."""
    for thread in {event["tid"] for event in spans(document)}:
        around: list[int] = []
        before = 0
        for event in spans(document):
            if event["tid"] != thread:
                continue
            begin = round(event["ts"] * 1000)
            end = begin + round(event["dur"] * 1000)
            assert begin >= before - 1
            before = begin
            while around and around[-1] <= begin + 1:  # to the nanosecond that floats hold
                around.pop()
            assert not around or end <= around[-1] + 1, event
            around.append(end)


def spans(document: dict[str, Any], name: str | None = None) -> list[Event]:
    found = [event for event in document["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if name in (None, event["name"])]


def names(document: dict[str, Any]) -> set[str]:
    return {event["name"] for event in spans(document)}


def counts(document: dict[str, Any], name: str) -> list[float]:
    found = [e for e in document["traceEvents"] if e["ph"] == "C" and e["name"] == name]
    return [event["args"][name] for event in found]


def inside(document: dict[str, Any], name: str) -> set[str]:
    """Return the names of the spans inside those of `name`."""
    found = set()
    for outer in spans(document, name):
        for event in spans(document):
            begins = outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"]
            if event is not outer and event["tid"] == outer["tid"] and begins:
                found.add(event["name"])
    return found


def share(document: dict[str, Any]) -> float:
    """Return the fraction of time covered by spans, in the thread with most spans."""
    threads = [event["tid"] for event in spans(document)]
    main = max(set(threads), key=threads.count)
    covered, until = 0.0, document["otherData"]["begin"]
    whole = document["otherData"]["end"] - until
    for event in spans(document):
        if event["tid"] == main:
            end = event["ts"] + event["dur"]
            covered += max(0.0, end - max(until, event["ts"]))
            until = max(until, end)
    return covered / whole
