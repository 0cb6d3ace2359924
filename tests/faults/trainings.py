"""Run small trainings in forked processes and compare their outcomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dynsparse.apps.common.resume import list_checkpoints
from dynsparse.apps.image_classification import Training
from dynsparse.apps.lm.training import Training as LmTraining
from dynsparse.training.records import Records

sys.path.insert(0, str(Path(__file__).parent))  # as in server.py, which is no part of a package
sys.path.insert(0, str(Path(__file__).parent.parent))
from checkpoint_files import read_parts
from sizes import OPTIONS

KINDS = {"mnist": Training, "lm": LmTraining}

# Times differ; the training draws from neither Python's nor NumPy's generator.
NOT_COMPARED = {
    "seconds", "update_seconds", "tokens_per_second", "python", "numpy",
    "seconds_per_step", "update_share",
}  # fmt: skip


class Server:
    """A client of `server.py`, which runs in another process."""

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def run(
        self,
        app: str,
        folder: Path,
        *,
        kind: str = "before",
        at: int | None = None,
        after: float | None = None,
        limit: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Train in `folder` and return the answer of the server."""
        request = {
            "app": app, "folder": str(folder), "kind": kind, "at": at, "after": after,
            "limit": limit, "options": {**written(app, folder), **options},
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def resume(self, app: str, folder: Path, **more: Any) -> dict[str, Any]:
        """Resume as a user would after a kill, or start again if there is no checkpoint."""
        if not checkpoints(app, folder):
            return self.run(app, folder, **begin(app, folder), overwrite=True, **more)
        often = {name: value for name, value in OPTIONS[app].items() if name == "checkpoint_freq"}
        return self.run(app, folder, restore=str(folder / "checkpoints"), **often, **more)


def begin(app: str, folder: Path) -> dict[str, Any]:
    """Return the options of a new training."""
    options = dict(OPTIONS[app])
    if app == "lm":
        options["data"] = str(folder.parent / "text.txt")
    return options


def written(app: str, folder: Path) -> dict[str, str]:
    names = {"checkpoint_path": "checkpoints", "records_path": "record", "json": "figures.json"}
    if app == "mnist":
        names["log"] = "log.txt"
    return {option: str(folder / name) for option, name in names.items()}


def checkpoints(app: str, folder: Path) -> list[Path]:
    place = folder / "checkpoints"
    return list_checkpoints(KINDS[app], place) if place.exists() else []


def outcome(app: str, folder: Path) -> dict[str, Any]:
    """Return everything a finished training has written, except times."""
    newest = checkpoints(app, folder)[-1]
    payload = read_parts(newest)
    records = Records.load(folder / "record")
    found = {
        "names": [file.name for file in checkpoints(app, folder)],
        "checkpoint": payload,
        "figures": json.loads((folder / "figures.json").read_text()),
        "steps": records.steps,
        "telemetry": records.telemetry,
        "patterns": {
            layer: [pattern.flat for _, pattern in records.patterns(layer)]
            for layer in records.layers
        },
        "left": sorted(file.name for file in folder.glob("*/.*")),
    }
    log = folder / "log.txt"
    return found | ({"log": log.read_text()} if log.exists() else {})


def with_last_epoch(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Fill in the figures that only a training process has: the last epoch's scores and the memory
    of its backward passes. A training that was resumed after its end lacks them."""
    own, whole = found["figures"], expected["figures"]
    scores = {name: whole[name] for name in ("train_loss", "train_accuracy") if name in own}
    if scores and all(own[name] is None for name in scores):
        return found | {"figures": own | scores | {"memory": whole["memory"]}}
    return found


def difference(first: Any, second: Any, where: str = "") -> str | None:
    """Return where two outcomes differ, or None if they are equal bit for bit."""
    if type(first) is not type(second):
        return f"{where}: {type(first).__name__}, {type(second).__name__}"
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
        return None if same else f"{where}: tensors"
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return f"{where}: {sorted(map(str, first.keys() ^ second.keys()))}"
        pairs = [(key, first[key], second[key]) for key in first if key not in NOT_COMPARED]
    elif isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return f"{where}: {len(first)} and {len(second)}"
        pairs = [(index, *both) for index, both in enumerate(zip(first, second, strict=True))]
    else:
        return None if first == second else f"{where}: {first!r}, {second!r}"
    found = (difference(one, other, f"{where}/{key}") for key, one, other in pairs)
    return next((text for text in found if text is not None), None)
