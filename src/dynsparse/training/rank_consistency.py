"""Trainers of several ranks that train one model: whether they began alike, and go on alike."""

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
    all_equal,
    broadcast_from_first,
    check_consistent,
    collective_errors,
    digest,
    find_differing,
    format_ranks,
    min_max_digest,
)
from dynsparse.training.optimizer_state import state_of

_SAME = "make the trainer with the same arguments on every rank"
_OTHERS = "pass ranks=None to train alone, or ranks=group, of the ranks that hold the same layers"

# Norms of a gradient that all ranks share differ by rounding at most, those of ranks that each have
# their own by percents.
_ALIKE = 1e-3


def broadcast_initial_state(
    ranks: Ranks,
    layers: Mapping[str, SparseLinear],
    said: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Every rank begins as the first does.

    Values and patterns that differ become those of the first rank, as data parallel training does
    it with all parameters. Sharded values are left as they are.

    Args:
        ranks: every one of them calls this.
        layers: by name.
        said: what else must be the same; plain types.
        optimizer: of the layers.

    Raises:
        ValueError: layers or options differ; the same line on all ranks.
        RuntimeError: patterns differ, and the optimizer has state already.
    """
    check_shards(ranks, layers)
    if ranks.alone:
        return
    check_consistent(ranks, {"the layers": ", ".join(map(repr, layers))}, _OTHERS)
    check_consistent(ranks, {f"the {what}": repr(one) for what, one in said.items()}, _SAME)
    state = {name: state_of(optimizer, layer.values) for name, layer in layers.items()}
    used = {n for n, own in state.items() if any(isinstance(t, Tensor) for t in own.values())}
    _broadcast_layers(ranks, layers, used)


def broadcast_layers(ranks: Ranks, model: nn.Module) -> None:
    """`broadcast_initial_state` for the sparse layers of a model without a trainer.

    Raises:
        ValueError: other layers; the same line on all ranks.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}
    if not ranks.alone:
        check_consistent(ranks, {"the layers": ", ".join(map(repr, layers))}, _OTHERS)
        _broadcast_layers(ranks, layers, set())


def _broadcast_layers(ranks: Ranks, layers: Mapping[str, SparseLinear], used: Set[str]) -> None:
    """Patterns and values of the first rank, where they differ; not of layers in `used`."""
    check_consistent(
        ranks,
        {f"layer {name!r}": str(layer.pattern) for name, layer in layers.items()},
        "give layers the same shape, block size and number of blocks on every rank",
    )
    kept = {name: layer for name, layer in layers.items() if not is_sharded(layer.values)}
    check_consistent(
        ranks,
        {
            f"the pattern of layer {name!r}": digest(layer.pattern.rows, layer.pattern.cols)
            for name, layer in layers.items()
            if name not in kept
        },
        "make the model with the same seed on every rank before it is sharded",
        shown=False,
    )
    state = [
        digest(layer.pattern.rows, layer.pattern.cols, layer.values.view(-1))
        for layer in kept.values()
    ]
    others = [list(kept)[i] for i in find_differing(ranks, state)]
    with collective_errors(ranks):
        for name in others:
            if name in used:
                raise RuntimeError(
                    f"layer {name!r} differs among the ranks, and the optimizer has state for it: "
                    "load the same checkpoint on every rank"
                )
    for name in others:
        broadcast_layer(ranks, kept[name])


@torch.no_grad()
def broadcast_layer(ranks: Ranks, layer: SparseLinear) -> None:
    """The layer's pattern and values become those of the first rank; as many blocks on all."""
    own = layer.pattern
    (flat,) = broadcast_from_first(ranks, [own.sorted_flat])
    values = ranks.broadcast(own.by_rows(layer.values.detach()).clone())
    pattern = SparsePattern.from_flat(flat, shape=own.shape, block_size=own.block_size)
    layer.set_pattern(pattern, values)


def check_shards(ranks: Ranks, layers: Mapping[str, SparseLinear]) -> None:
    """Raise ValueError where values are shared out among ranks that are not all asked."""
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
    said: Mapping[str, Any],
    layers: Mapping[str, SparseLinear],
    check: Callable[[], None],
) -> None:
    """Raise, the same on all ranks, where they are not about to make the same update.

    Args:
        step: that ends in it.
        said: what the pieces of the trainer say of themselves; plain types and tensors.
        layers: that are trained.
        check: raises what else is wrong on one rank.

    Raises:
        ValueError: other steps, or other `said`.
        RuntimeError: gradients that each rank has for itself.
    """
    if ranks.alone:
        check()
        return
    ranks.all_ranks.barrier(
        f"step {step} of this rank ends in an update; call trainer.step() as often on every rank",
        ranks.timeout,
    )
    states = {f"the {what}": _digest(one) for what, one in said.items()}
    ends, norms = [0] * 2, _Norms(layers)
    told = [*ends, *norms.ends]
    with collective_errors(ranks, told):  # all of it in one move
        check()
        norms.look()
        told[:] = [*min_max_digest(step, states), *norms.ends]
    if not all_equal(ranks, told):
        check_consistent(
            ranks,
            {"the step that ends in an update": str(step)},
            "call trainer.step() as often on every rank, and load the same state",
        )
        check_consistent(ranks, states, f"{_SAME}, and load the same state", shown=False)
    norms.compare(ranks, told[2:])


def _digest(thing: Any) -> int:
    """Of plain types and tensors."""
    if isinstance(thing, Tensor):
        return digest(str(thing.dtype), thing)
    if isinstance(thing, Mapping):
        return digest(*(f"{key!r}:{_digest(one)}" for key, one in thing.items()))
    if isinstance(thing, (list, tuple)):
        return digest(*(str(_digest(one)) for one in thing))
    return digest(repr(thing))


class _Norms:
    """Lengths of the gradients of layers, by which ranks find out whether they share them.

    Args:
        layers: those whose values are sharded are left out.

    Attributes:
        ends: numbers that go along with `collective_errors`, as many on all ranks.
    """

    def __init__(self, layers: Mapping[str, SparseLinear]) -> None:
        self._layers = {n: layer for n, layer in layers.items() if not is_sharded(layer.values)}
        self._own = torch.zeros(len(self._layers), dtype=torch.float64)
        self.ends = [0] * 2 * len(self._layers)

    def look(self) -> None:
        """Take the lengths of this rank's gradients."""
        for i, layer in enumerate(self._layers.values()):
            if layer.values.grad is not None:
                self._own[i] = _norm(layer.values.grad.detach())
        # Numbers that are not negative ascend as their bits do, which are sent as they are.
        bits = self._own.view(torch.int64).tolist()
        self.ends = [*bits, *(~one for one in bits)]

    def compare(self, ranks: Ranks, ends: Sequence[int]) -> None:
        """Raise RuntimeError, the same on all ranks, where each has a gradient of its own.

        Args:
            ends: the highest of all ranks.
        """
        most, least = torch.tensor(ends, dtype=torch.int64).view(2, -1)
        line = self._apart(ranks, most.view(torch.float64), (~least).view(torch.float64))
        if ranks.all_ranks is ranks:
            if line:
                raise RuntimeError(line)
            return
        with collective_errors(ranks):  # lines of a mesh compare for themselves, and all hear of it
            if line:
                raise RuntimeError(line)

    def _apart(self, ranks: Ranks, most: Tensor, least: Tensor) -> str:
        """What to say of the first layer whose norms are not alike on all ranks; "" if they are."""
        apart = ((most - least) > _ALIKE * most).nonzero().flatten().tolist()
        return _line_of(ranks, list(self._layers)[apart[0]], self._own[apart[0]]) if apart else ""


def _line_of(ranks: Ranks, name: str, norm: Tensor) -> str:
    """That ranks have other gradients of a layer."""
    own = torch.cat(ranks.all_gather(norm.view(1).to(ranks.device), [1] * ranks.size)).tolist()
    alike = [rank for rank, norm in enumerate(own) if abs(norm - own[0]) <= _ALIKE * own[0]]
    others = [rank for rank in range(ranks.size) if rank not in alike]
    return (
        f"layer {name!r}: {format_ranks(alike)} and {format_ranks(others)} have other "
        "gradients, so they do not train one model: wrap it in DistributedDataParallel, or in "
        "dynsparse.distributed.replicate, or pass ranks=None to train alone"
    )


def _norm(tensor: Tensor) -> Tensor:
    """Its length, in the type that it is added up in quickly and well enough for `_ALIKE`."""
    return tensor.norm(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def layers_with_gradients(
    step: int, layers: Mapping[str, SparseLinear], reached: Sequence[int]
) -> dict[str, SparseLinear]:
    """The layers through which a backward pass came, on any rank, as `reached` says of each.

    Where none came through there is nothing to rank by.

    Raises:
        RuntimeError: there are layers, and it is none of them.
    """
    found = {n: layers[n] for n, any_ in zip(layers, reached, strict=True) if any_}
    if not found and layers:
        raise RuntimeError(
            f"step {step} ends in a pattern update, but no gradient reached any sparse layer since "
            "the step before: call trainer.step() after loss.backward(), and make the trainer "
            "after moving the model to its device"
        )
    return found


class PatternComparison:
    """What the ranks compare of the patterns after an update.

    Args:
        ranks: that take it together.
        step: that ends in it.
        rewirings: by layer name.

    Attributes:
        ends: numbers that go along with `collective_errors`: see `ranks.min_max_digest`.
    """

    def __init__(self, ranks: Ranks, step: int, rewirings: Mapping[str, Rewiring]) -> None:
        self._ranks = ranks
        self._names = ", ".join(map(repr, rewirings))
        self._patterns = (
            {}
            if ranks.alone
            else {
                f"the pattern of layer {name!r} after step {step}": digest(
                    rewiring.after.row_ptr, rewiring.after.sorted_cols, rewiring.after.slots
                )
                for name, rewiring in rewirings.items()
            }
        )
        self.ends = min_max_digest(self._names, self._patterns)

    def compare(self) -> None:
        """Raise ValueError, the same on all ranks, where they differ; `ends` has gone along."""
        if self._ranks.alone or all_equal(self._ranks, self.ends):
            return
        check_consistent(self._ranks, {"the layers that change": self._names}, _SAME)
        check_consistent(
            self._ranks,
            self._patterns,
            "change patterns through the trainer alone, and load the same state on every rank",
            shown=False,
        )


def describe_function(function: Any) -> str:
    """What tells a function, or a thing that is called like one, from others."""
    kind = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{kind}{vars(function) if hasattr(function, '__dict__') else ''}"
