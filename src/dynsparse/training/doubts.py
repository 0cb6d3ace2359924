"""What a device finds wrong with an update: the host hears of it later, without waiting.

Where layers are on the CPU, what an update ranks by is looked through before anything changes. To
look at numbers of a device makes the host wait for all the work that was given to it. So there the
device decides by itself: an update that would rank by NaN or infinity leaves the pattern as it was
(`Rewiring._on_device`), and the trainer says so at the next step that ends in an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear
from dynsparse.pattern.arriving import Arriving


class _Doubt(NamedTuple):
    answer: Arriving
    line: str


_open: WeakKeyDictionary[SparseLinear, list[_Doubt]] = WeakKeyDictionary()


def not_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether any of them holds NaN or infinity: bool, on their device."""
    seen = [t.detach() for t in tensors if t.numel() and t.is_floating_point()]
    largest = [torch.linalg.vector_norm(tensor, torch.inf) for tensor in seen]
    return torch.stack([norm.isfinite() for norm in largest]).all().logical_not()


def ask(layer: SparseLinear, wrong: Tensor, line: str) -> None:
    """Raise `line` as a ValueError when `settle` next looks at the layer, if `wrong` holds."""
    _open.setdefault(layer, []).append(_Doubt(Arriving(wrong), line))


def settle(layers: Mapping[str, SparseLinear]) -> None:
    """Raise ValueError for the first update of these layers that did not happen, and forget it."""
    for name, layer in layers.items():
        doubts = _open.pop(layer, [])
        unknown = [doubt for doubt in doubts if not doubt.answer.is_there]
        if unknown:
            _open[layer] = unknown
        for doubt in doubts:
            if not any(doubt is one for one in unknown) and bool(doubt.answer.get()[0]):
                raise ValueError(f"layer {name!r}: {doubt.line}")
