"""Checks of the numbers that an update ranks: at once on the CPU, deferred on devices.

To read a device's numbers, the host would wait for all work that the device has queued. So the
device decides itself: an update that would rank NaN or infinity leaves the pattern as it is
(`PatternStack.rewire`), and the trainer raises the error at a later step that ends in an update.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dynsparse._core.checks import is_finite
from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import local_part
from dynsparse.pattern.on_device import HostCopy

NAN_SCORES = "drop scores hold NaN, so blocks cannot be ranked: the training diverged"


class layer_errors:
    """A context manager that adds the layer's name to errors.

    They become the cause of a ValueError, a TypeError or a RuntimeError that has it. A class, since
    an update enters several for each layer, and generators take three times as long.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind_of_error: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or f"layer {self._name!r}" in str(error):
            return
        for kind in (ValueError, TypeError, RuntimeError):
            if isinstance(error, kind):
                raise kind(f"layer {self._name!r}: {error}") from error
        raise RuntimeError(f"layer {self._name!r}: {type(error).__name__}: {error}") from error


def check_one_per_block(scores: Tensor, nnz: int) -> None:
    """Raise ValueError unless there is one score per block."""
    if not isinstance(scores, Tensor) or list(scores.shape) != [nnz]:
        actual = list(scores.shape) if isinstance(scores, Tensor) else repr(scores)
        raise ValueError(f"expected one drop score per block, [{nnz}], got {actual}")


def check_scores(scores: Tensor, nnz: int) -> Tensor:
    """Raise ValueError unless there is one score per block, and none is NaN."""
    check_one_per_block(scores, nnz)
    local = local_part(scores)
    if len(local) and bool(torch.isnan(local.min())):
        raise ValueError(NAN_SCORES)
    return scores


def check_gradients(
    layers: Mapping[str, SparseLinear],
    pairs: Mapping[str, Collection[tuple[Tensor, Tensor]]],
    alone: bool = False,
) -> None:
    """Raise ValueError, with the layer's name, where a gradient holds NaN or infinity; RuntimeError
    where backward has made gradients, and none is left.

    Args:
        layers: whose weights are ranked.
        pairs: x and dY by layer name, of which other gradients are computed.
        alone: whether this rank decides alone. Then numbers on devices are checked when they are
            ranked, and the errors of the previous update raised here.
    """
    raise_pending_errors(layers)
    has_no_gradients = all(layer.values.grad is None for layer in layers.values())
    if layers and has_no_gradients and any(map(len, pairs.values())):
        raise RuntimeError(
            "the gradients were cleared before the step, whose update needs them: call "
            "zero_grad() after the step or before backward()"
        )
    for name, layer in layers.items():
        if alone and layer.is_on_device:
            continue
        grad = layer.values.grad
        if grad is not None and not is_finite(local_part(grad)):
            raise ValueError(_NOT_FINITE.format(name=name, what="the gradient of its weights"))
        for pair in pairs.get(name, ()):
            for what, tensor in zip(("x", "dY"), pair, strict=True):
                if not is_finite(tensor):
                    raise ValueError(_NOT_FINITE.format(name=name, what=what))


_NOT_FINITE = (
    "layer {name!r}: {what} holds NaN or infinity, and this step ends in a pattern update, which "
    "would rank by it: the training has diverged, or the loss is scaled too far"
)


def any_not_finite(ranked: Sequence[Sequence[Tensor]]) -> Tensor:
    """Whether any of the tensors of each layer holds NaN or infinity: bool [layers], on the device
    that they share."""
    device = next(t.device for tensors in ranked for t in tensors)
    checked = [
        [t.detach() for t in tensors if t.numel() and t.is_floating_point()] for tensors in ranked
    ]
    together = [t for tensors in checked for t in tensors]
    if not together:
        return torch.zeros(len(ranked), dtype=torch.bool, device=device)
    finite = torch.stack(torch._foreach_norm(together, torch.inf)).isfinite()
    return torch.stack([part.all() for part in finite.split([*map(len, checked)])]).logical_not()


_pending: WeakKeyDictionary[SparseLinear, list[tuple[HostCopy, int, str]]] = WeakKeyDictionary()


def defer_checks(layers: Sequence[SparseLinear], failed: Tensor, line: str) -> None:
    """Let `raise_pending_errors` raise `line` as a ValueError for those layers where `failed`, bool
    [layers], holds."""
    copy = HostCopy(failed)
    for i, layer in enumerate(layers):
        _pending.setdefault(layer, []).append((copy, i, line))


def raise_pending_errors(layers: Mapping[str, SparseLinear]) -> None:
    """Raise ValueError for the first deferred check of these layers that failed, and forget it."""
    for name, layer in layers.items():
        ready = []
        for check in _pending.pop(layer, []):
            if check[0].is_ready:
                ready.append(check)
            else:
                _pending.setdefault(layer, []).append(check)
        for result, i, line in ready:
            if result.get()[0].numpy()[i]:
                raise ValueError(f"layer {name!r}: {line}")
