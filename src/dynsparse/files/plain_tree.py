"""Trees of plain types as JSON, and back: what checkpoints hold beside the bytes of tensors.

None, booleans, numbers, texts, lists, tuples, dictionaries with keys of these, and tensors, for
which a name stands. What JSON has no sign for is an object with the one key "$".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynsparse.files.shorten import shortened

_MARK = "$"


def to_tree(
    value: Any, keep: Callable[[str, Any], str], path: str = "", kept: type = Tensor
) -> Any:
    """`value` made of what JSON has.

    Args:
        keep: from where in the tree a tensor is, and the tensor, to the name that stands for it.
        kept: what else `keep` takes.

    Raises:
        TypeError: anything that is none of these types.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_MARK: ["float", repr(float(value))]}
    if isinstance(value, (Tensor, kept)):
        return {_MARK: ["tensor", keep(path, value)]}
    if isinstance(value, torch.dtype):
        return {_MARK: ["dtype", str(value).removeprefix("torch.")]}
    if isinstance(value, (list, tuple)):
        parts = [to_tree(one, keep, f"{path}/{i}", kept) for i, one in enumerate(value)]
        return parts if type(value) is list else {_MARK: ["tuple", parts]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _MARK not in value:
            return {key: to_tree(one, keep, f"{path}/{key}", kept) for key, one in value.items()}
        pairs = [
            [to_tree(key, keep, path), to_tree(one, keep, f"{path}/{key}", kept)]
            for key, one in value.items()
        ]
        return {_MARK: ["dict", pairs]}
    raise TypeError(
        "a checkpoint holds only tensors, numbers, strings and containers of them; found "
        f"{type(value).__name__} at {path or 'its root'}: convert it first"
    )


def from_tree(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """What `to_tree` was given.

    Args:
        tensor: from a name to what takes its place.

    Raises:
        ValueError: what `to_tree` does not make.
    """
    if isinstance(tree, list):
        return [from_tree(one, tensor) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if _MARK not in tree:
        return {key: from_tree(one, tensor) for key, one in tree.items()}
    marked = tree[_MARK]
    kind, held = marked if isinstance(marked, list) and len(marked) == 2 else (None, None)
    if kind == "tensor" and isinstance(held, str):
        return tensor(held)
    if kind == "float" and held in ("nan", "inf", "-inf"):
        return float(held)
    if kind == "tuple" and isinstance(held, list):
        return tuple(from_tree(one, tensor) for one in held)
    if kind == "dtype" and isinstance(held, str):
        found = vars(torch).get(held)
        if isinstance(found, torch.dtype):
            return found
    if kind == "dict" and isinstance(held, list):
        pairs = [from_tree(pair, tensor) for pair in held]
        try:
            return {key: one for key, one in pairs}  # noqa: C416  a pair has two parts
        except (TypeError, ValueError):
            pass
    raise ValueError(f"expected a tree of plain types, got {shortened(marked)}")
