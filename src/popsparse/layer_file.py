"""Layers of the tile machine in files: the plan, how the layer was built, its weights.

A file has the format of safetensors: of each group the positions of its blocks, int64, and its
values; the rest is JSON beside them. Nothing in it is code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Sequence_
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dynsparse.files.json_text import parse_json
from dynsparse.files.tensor_file import TensorFile, write_tensors
from popsparse.encoding.formats import COOMatrix
from popsparse.planning.plan import Plan
from popsparse.planning.stored import read_plan, stored_plan

_FORMAT = "dynsparse layer 1"
_PARTS = ("rows", "columns", "values")


class StoredLayer(NamedTuple):
    """What a file holds.

    Attributes:
        plan: of the layer.
        built: the other arguments of its constructor, as plain types.
        weights: of each group; empty where no pattern was set.
    """

    plan: Plan
    built: dict[str, Any]
    weights: Sequence_[COOMatrix]


def write_layer(file: Path, layer: StoredLayer) -> None:
    """Write the file, which appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
        TypeError: a plan for a target, or of options, of a class of the user's own.
    """
    about = {"groups": len(layer.weights), "built": layer.built, "plan": stored_plan(layer.plan)}
    arrays = {
        f"{name} {group}": torch.from_numpy(np.ascontiguousarray(part))
        for group, one in enumerate(layer.weights)
        for name, part in zip(
            _PARTS, (one.row_indices, one.column_indices, one.nz_values), strict=True
        )
    }
    text = json.dumps(about, allow_nan=False)
    write_tensors(file, arrays, {"format": _FORMAT, "layer": text})


def read_layer(file: Path) -> StoredLayer:
    """What `write_layer` was given.

    Raises:
        OSError: the file cannot be read.
        ValueError: another file, a damaged one, or a plan of another version of the planner.
    """
    found = TensorFile(file)
    if found.about.get("format") != _FORMAT:
        raise ValueError("expected a layer as popsparse.Layer.save writes it, got something else")
    about = parse_json(str(found.about.get("layer")))
    match about:
        case {"groups": int(groups), "built": dict(built), "plan": stored}:
            pass
        case _:
            raise ValueError("expected the plan of a layer and how it was built, got others")
    plan = read_plan(stored)
    if groups not in (0, plan.partition.groups):
        raise ValueError(f"expected weights of {plan.partition.groups} groups, got {groups}")
    weights = [_read_weights(found, group, plan) for group in range(groups)]
    return StoredLayer(plan, built, weights)


def _read_weights(file: TensorFile, group: int, plan: Plan) -> COOMatrix:
    rows, columns, values = (file.read(f"{name} {group}").numpy() for name in _PARTS)
    shape = (plan.sizes.x, plan.sizes.y)
    return COOMatrix(values, columns, rows, shape, plan.params.sparsity_params.block_dimensions)
