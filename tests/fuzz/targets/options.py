"""JSON arguments of commands: options of plans, arguments of optimizers, stored figures."""

from __future__ import annotations

import json

from dynsparse.bench.results import load_results
from dynsparse.options import _read, json_object, pairs
from targets.common import folder, refused_as

_WAYS = 3
_SPREAD = {"median": 1.0, "low": 0.9, "high": 1.1}
_CELL = {
    "layer": "784x300", "features": [784, 300], "batch": 128, "density": 0.1, "block": 1,
    "threads": 1, "dtype": "float32", "kernel": "sparse", "times": {"dynsparse": _SPREAD},
    "ratios": {"masked": _SPREAD}, "rounds": 5, "foreign": 0.0, "disturbed": False,
}  # fmt: skip
_RESULTS = {
    "format": "dynsparse-bench", "version": 1, "machine": {"cpu": "x"}, "spec": "benchmarks.yml",
    "benchmarks": {
        "a": {
            "about": "x", "measure": "step", "reference": "dynsparse", "measured": "2026-01-01",
            "cells": [_CELL], "refused": [{"cell": "x", "why": "y"}],
        }
    },
}  # fmt: skip
SEEDS = [
    b'\0{"period": 0.5, "x": [1, 2]}',
    b"\1betas=[0.9, 0.95]",
    b"\2" + json.dumps(_RESULTS).encode(),
]


def run(data: bytes) -> None:
    way, content = data[0] % _WAYS if data else 0, data[1:]
    file = folder() / "figures.json"
    file.write_bytes(content)
    with refused_as(ValueError):
        if way == 0:
            kind = json_object('{"period": 0.5}')
            assert isinstance(_read(kind, "options", content.decode()), dict)
        elif way == 1:
            _read(pairs("betas=[0.9, 0.95]"), "optimizer-arg", [content.decode()])
        else:
            load_results(file)
