"""Checks that the ranks of one training start with the same state, and stay consistent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import is_sharded
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.ranks import (
    Ranks,
    are_all_equal,
    check_consistent,
    collective_errors,
    digest,
    find_differing,
    format_ranks,
    group_errors,
    min_max_digest,
)
from dynsparse.training.optimizer_state import states_of

_SAME_ARGUMENTS = "make the trainer with the same arguments on every rank"
_RANKS = "pass ranks=None to train alone, or ranks=group, of the ranks that hold the same layers"

# Norms of a shared gradient differ by rounding at most, those of separate gradients by percents.
_TOLERANCE = 1e-3


def broadcast_initial_state(
    ranks: Ranks,
    layers: Mapping[str, SparseLinear],
    settings: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Give every rank the first rank's state.

    Values and patterns that differ become those of the first rank, as DistributedDataParallel does
    with all parameters. Sharded values are left as they are.

    Args:
        ranks: every one of them calls this.
        layers: by name.
        settings: what else must be equal; plain types.
        optimizer: of the layers.

    Raises:
        ValueError: layers or settings differ; the same line on all ranks.
        RuntimeError: patterns differ, and the optimizer has state already.
    """
    check_shards(ranks, layers)
    if ranks.alone:
        return
    check_consistent(ranks, {"the layers": ", ".join(map(repr, layers))}, _RANKS)
    check_consistent(
        ranks, {f"the {key}": repr(setting) for key, setting in settings.items()}, _SAME_ARGUMENTS
    )
    used = {
        name
        for name, layer in layers.items()
        for _, state in states_of(optimizer, layer.values)
        if any(isinstance(tensor, Tensor) for tensor in state.values())
    }
    _broadcast_differing(ranks, layers, used)


def broadcast_layers(ranks: Ranks, model: nn.Module) -> None:
    """`broadcast_initial_state` for the sparse layers of a model without a trainer.

    Raises:
        ValueError: other layers; the same line on all ranks.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}
    if not ranks.alone:
        check_consistent(ranks, {"the layers": ", ".join(map(repr, layers))}, _RANKS)
        _broadcast_differing(ranks, layers, set())


def _broadcast_differing(ranks: Ranks, layers: Mapping[str, SparseLinear], used: Set[str]) -> None:
    """Broadcast patterns and values where they differ, but not of layers in `used`."""
    check_consistent(
        ranks,
        {
            f"layer {name!r}": f"{layer.pattern} of {layer.values.dtype}"
            for name, layer in layers.items()
        },
        "give layers the same shape, block size, number of blocks and dtype on every rank",
    )
    full = {name: layer for name, layer in layers.items() if not is_sharded(layer.values)}
    check_consistent(
        ranks,
        {
            f"the pattern of layer {name!r}": digest(layer.pattern.rows, layer.pattern.cols)
            for name, layer in layers.items()
            if name not in full
        },
        "make the model with the same seed on every rank before it is sharded",
        shown=False,
    )
    state = [
        digest(layer.pattern.rows, layer.pattern.cols, layer.values.view(-1))
        for layer in full.values()
    ]
    differing = [list(full)[i] for i in find_differing(ranks, state)]
    with collective_errors(ranks):
        for name in differing:
            if name in used:
                raise RuntimeError(
                    f"layer {name!r} differs among the ranks, and the optimizer has state for it: "
                    "load the same checkpoint on every rank"
                )
    for name in differing:
        _broadcast_layer(ranks, full[name])


@torch.no_grad()
def _broadcast_layer(ranks: Ranks, layer: SparseLinear) -> None:
    """Give the layer the first rank's pattern and values; all have as many blocks."""
    pattern = layer.pattern
    flat = ranks.broadcast(pattern.sorted_flat)
    values = ranks.broadcast(pattern.by_rows(layer.values.detach()).clone())
    first = SparsePattern.from_flat(flat, shape=pattern.shape, block_size=pattern.block_size)
    layer.set_pattern(first, values)


def check_shards(ranks: Ranks, layers: Mapping[str, SparseLinear]) -> None:
    """Raise ValueError where values are sharded over more ranks than decide together."""
    for name, layer in layers.items():
        if not is_sharded(layer.values):
            continue
        shards = layer.values.device_mesh.size()  # type: ignore[attr-defined]
        if shards > ranks.size:
            raise ValueError(
                f"the values of layer {name!r} are sharded over {shards} ranks, which must decide "
                f"together, got {ranks.size}: pass ranks that hold the whole model, or leave ranks "
                "out"
            )


def check_before_update(
    ranks: Ranks,
    step: int,
    inputs: Mapping[str, Any],
    layers: Mapping[str, SparseLinear],
    check: Callable[[], None],
) -> None:
    """Raise, the same on all ranks, unless they are about to make the same update.

    Args:
        step: that ends in it.
        inputs: settings and state of the trainer's components; plain types and tensors.
        layers: that are trained.
        check: raises what else is wrong on one rank.

    Raises:
        ValueError: other steps, or other `inputs`.
        RuntimeError: each rank has a different gradient.
    """
    if ranks.alone:
        check()
        return
    ranks.all_ranks.barrier(
        f"step {step} of this rank ends in an update; call trainer.step() as often on every rank",
        ranks.timeout,
    )
    states = {f"the {key}": _digest(value) for key, value in inputs.items()}
    norms = _GradientNorms(layers)
    numbers = [*[0] * 2, *norms.numbers]
    with collective_errors(ranks, numbers):  # one all-reduce for all of it
        check()
        norms.compute()
        numbers[:] = [*min_max_digest(step, states), *norms.numbers]
    if not are_all_equal(ranks, numbers):
        check_consistent(
            ranks,
            {"the step that ends in an update": str(step)},
            "call trainer.step() as often on every rank, and load the same state",
        )
        check_consistent(ranks, states, f"{_SAME_ARGUMENTS}, and load the same state", shown=False)
    norms.compare(ranks, numbers[2:])


def _digest(thing: Any) -> int:
    """A digest of plain types and tensors, also nested."""
    if isinstance(thing, Tensor):
        return digest(str(thing.dtype), thing)
    if isinstance(thing, Mapping):
        return digest(*(f"{key!r}:{_digest(value)}" for key, value in thing.items()))
    if isinstance(thing, (list, tuple)):
        return digest(*(str(_digest(value)) for value in thing))
    return digest(repr(thing))


class _GradientNorms:
    """Norms of gradients, by which ranks find out whether they share them.

    Args:
        layers: those whose values are sharded are left out.

    Attributes:
        numbers: to be reduced by `collective_errors`, as many on all ranks.
    """

    def __init__(self, layers: Mapping[str, SparseLinear]) -> None:
        self._layers = {n: layer for n, layer in layers.items() if not is_sharded(layer.values)}
        self._local = torch.zeros(len(self._layers), dtype=torch.float64, device="cpu")
        self.numbers = [0] * 2 * len(self._layers)

    def compute(self) -> None:
        """Compute the norms of this rank's gradients."""
        for i, layer in enumerate(self._layers.values()):
            grad = layer.values.grad
            if grad is not None:
                # A type that is fast to add up in, and precise enough for `_TOLERANCE`.
                dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
                self._local[i] = grad.detach().norm(dtype=dtype)
        # The bits of numbers that are not negative have the order of the numbers.
        bits = self._local.view(torch.int64).tolist()
        self.numbers = [*bits, *(~bit for bit in bits)]

    def compare(self, ranks: Ranks, numbers: Sequence[int]) -> None:
        """Raise RuntimeError, the same on all ranks, where each has a different gradient.

        Args:
            numbers: the maxima over all ranks.
        """
        bits, inverted = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(2, -1)
        highest, lowest = bits.view(torch.float64), (~inverted).view(torch.float64)
        apart = ((highest - lowest) > _TOLERANCE * highest).nonzero().flatten().tolist()
        with group_errors(ranks):
            if apart:
                raise RuntimeError(self._describe(ranks, apart[0]))

    def _describe(self, ranks: Ranks, index: int) -> str:
        """The error message with the ranks that have different gradients of a layer."""
        name, norm = list(self._layers)[index], self._local[index]
        gathered = ranks.all_gather(norm.view(1).to(ranks.device), [1] * ranks.size)
        norms = torch.cat(gathered).tolist()
        same = [i for i, n in enumerate(norms) if abs(n - norms[0]) <= _TOLERANCE * norms[0]]
        others = [rank for rank in range(ranks.size) if rank not in same]
        return (
            f"layer {name!r}: {format_ranks(same)} and {format_ranks(others)} have other "
            "gradients, so they do not train one model: wrap it in DistributedDataParallel, or in "
            "dynsparse.distributed.replicate, or pass ranks=None to train alone"
        )


def layers_with_gradients(
    step: int, layers: Mapping[str, SparseLinear], has_gradient: Sequence[int]
) -> dict[str, SparseLinear]:
    """The layers that a backward pass reached on any rank, as `has_gradient` says of each. There
    are no gradients to rank by for the others.

    Raises:
        RuntimeError: there are layers, and no gradient reached any.
    """
    reached = {n: layers[n] for n, has in zip(layers, has_gradient, strict=True) if has}
    if not reached and layers:
        raise RuntimeError(
            f"step {step} ends in a pattern update, but no gradient reached any sparse layer since "
            "the step before: call trainer.step() after loss.backward(), and make the trainer "
            "after moving the model to its device; gradients that are set by hand or come from "
            "torch.func are not seen, and SET needs none"
        )
    return reached


class PatternComparison:
    """Compares the patterns after an update over ranks.

    Args:
        ranks: that take the update together.
        step: that ends in it.
        rewirings: by layer name.

    Attributes:
        numbers: to be reduced by `collective_errors`: see `ranks.min_max_digest`.
    """

    def __init__(self, ranks: Ranks, step: int, rewirings: Mapping[str, Rewiring]) -> None:
        self._ranks = ranks
        self._names = ", ".join(map(repr, rewirings))
        self._patterns: dict[str, int] = {}
        if not ranks.alone:
            for name, rewiring in rewirings.items():
                after = rewiring.after
                self._patterns[f"the pattern of layer {name!r} after step {step}"] = digest(
                    after.row_ptr, after.sorted_cols, after.slots
                )
        self.numbers = min_max_digest(self._names, self._patterns)

    def compare(self) -> None:
        """Raise ValueError, the same on all ranks, where patterns differ; `numbers` are reduced."""
        if self._ranks.alone or are_all_equal(self._ranks, self.numbers):
            return
        check_consistent(self._ranks, {"the layers that change": self._names}, _SAME_ARGUMENTS)
        check_consistent(
            self._ranks,
            self._patterns,
            "change patterns through the trainer alone, and load the same state on every rank",
            shown=False,
        )


def describe_function(function: Any) -> str:
    """The name and attributes of a function or a callable object, for comparison."""
    kind = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{kind}{vars(function) if hasattr(function, '__dict__') else ''}"
