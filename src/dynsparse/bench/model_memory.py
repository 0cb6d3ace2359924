"""Peak memory of the training of a whole model. Linux only.

Run as a program it trains one contender, so that each has a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynsparse.bench.cells import Cell
from dynsparse.bench.model_steps import build_model, training_step
from dynsparse.bench.parts import blocks_of
from dynsparse.bench.zoo import MODELS
from dynsparse.nn import SparseLinear


def measure_memory(cell: Cell, names: Iterable[str]) -> dict[str, Any]:
    """Bytes of every contender, the model with all its blocks: plain types.

    - peak: how far the resident memory rises above that of a process which has imported everything,
      in two training steps. What making the model takes beyond what stays is not counted;
    - state: parameters, gradients, both of AdamW's moments, and indices or masks;
    - blocks: what of the state belongs to the blocks.

    Raises:
        RuntimeError: a training failed; with the last line of what it said.
    """
    found = {"dynsparse": _apart(cell, "dynsparse")}
    for who in names:
        # Dense tensors take what they take at every density.
        found[who] = _apart(replace(cell, density=0.1, block=1), who)
    return {"memory": found}


@lru_cache(maxsize=64)
def _apart(cell: Cell, who: str) -> dict[str, int]:
    words = [sys.executable, "-m", __name__, json.dumps(asdict(cell)), who]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"{cell}, {who}: the training failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _train(cell: Cell, who: str) -> dict[str, int]:
    torch.set_num_threads(cell.threads)
    MODELS[cell.model].make(1)  # imports
    before = _resident("VmRSS")
    model = build_model(cell, who, MODELS[cell.model].blocks)
    # The peak so far, of making the model dense first, is forgotten.
    Path("/proc/self/clear_refs").write_text("5")
    step = training_step(cell, model)
    for _ in range(2):
        step()
    return {
        "peak": _resident("VmHWM") - before,
        "state": _state(model),
        "blocks": _state(blocks_of(model)[1]),
    }


def _resident(field: str) -> int:
    """Of this process, in bytes: VmRSS now, VmHWM at its peak."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _state(model: nn.Module) -> int:
    """Value, gradient and two moments of every parameter, and what says where they are."""
    total = sum(4 * p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    for layer in model.modules():
        if isinstance(layer, SparseLinear):
            total += sum(tensor.nbytes for tensor in layer.index)
    return total


if __name__ == "__main__":
    sizes = json.loads(sys.argv[1])
    print(json.dumps(_train(Cell(**sizes | {"features": tuple(sizes["features"])}), sys.argv[2])))
