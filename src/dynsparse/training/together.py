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
    agree_on,
    agreeing,
    differing,
    digest,
    named_ranks,
    of_first,
    say_the_same,
)

__all__ = [
    "agree_before",
    "agree_on_patterns",
    "begin_alike",
    "begin_layers_alike",
    "check_same_gradients",
    "name_of",
    "reached_by",
]

_SAME = "make the trainer with the same arguments on every rank"
_OTHERS = "pass ranks=None to train alone, or ranks=group, of the ranks that hold the same layers"

# Norms of a gradient that all ranks share differ by rounding at most, those of ranks that each have
# their own by percents.
_ALIKE = 1e-3


def begin_alike(
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
    agree_on(ranks, {"the layers": ", ".join(map(repr, layers))}, _OTHERS)
    agree_on(ranks, {f"the {what}": repr(one) for what, one in said.items()}, _SAME)
    state = {name: optimizer.state.get(layer.values, {}) for name, layer in layers.items()}
    used = {n for n, own in state.items() if any(isinstance(t, Tensor) for t in own.values())}
    _take_over(ranks, layers, used)


def begin_layers_alike(ranks: Ranks, model: nn.Module) -> None:
    """`begin_alike` for the sparse layers of a model without a trainer.

    Raises:
        ValueError: other layers; the same line on all ranks.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}
    if not ranks.alone:
        agree_on(ranks, {"the layers": ", ".join(map(repr, layers))}, _OTHERS)
        _take_over(ranks, layers, set())


def _take_over(ranks: Ranks, layers: Mapping[str, SparseLinear], used: Set[str]) -> None:
    """Patterns and values of the first rank, where they differ; not of layers in `used`."""
    agree_on(
        ranks,
        {f"layer {name!r}": str(layer.pattern) for name, layer in layers.items()},
        "give layers the same shape, block size and number of blocks on every rank",
    )
    kept = {name: layer for name, layer in layers.items() if not is_sharded(layer.values)}
    agree_on(
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
    others = [list(kept)[i] for i in differing(ranks, state)]
    with agreeing(ranks):
        for name in others:
            if name in used:
                raise RuntimeError(
                    f"layer {name!r} differs among the ranks, and the optimizer has state for it: "
                    "load the same checkpoint on every rank"
                )
    for name in others:
        take_from_first(ranks, kept[name])


@torch.no_grad()
def take_from_first(ranks: Ranks, layer: SparseLinear) -> None:
    """The layer's pattern and values become those of the first rank; as many blocks on all."""
    own = layer.pattern
    (flat,) = of_first(ranks, [own.flat])
    values = ranks.broadcast(layer.values.detach().clone())
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


def agree_before(ranks: Ranks, step: int, said: Mapping[str, Any]) -> None:
    """Raise ValueError, the same on all ranks, where they are not about to make the same update.

    Args:
        step: that ends in it.
        said: what the pieces of the trainer say of themselves; plain types and tensors.
    """
    if ranks.alone:
        return
    ranks.everyone.meet(
        f"step {step} of this rank ends in an update; call trainer.step() as often on every rank",
        ranks.patience,
    )
    states = {f"the {what}": _digest(one) for what, one in said.items()}
    if say_the_same(ranks, step, states):
        return
    agree_on(
        ranks,
        {"the step that ends in an update": str(step)},
        "call trainer.step() as often on every rank, and load the same state",
    )
    agree_on(ranks, states, f"{_SAME}, and load the same state", shown=False)


def _digest(thing: Any) -> int:
    """Of plain types and tensors."""
    if isinstance(thing, Tensor):
        return digest(str(thing.dtype), thing)
    if isinstance(thing, Mapping):
        return digest(*(f"{key!r}:{_digest(one)}" for key, one in thing.items()))
    if isinstance(thing, (list, tuple)):
        return digest(*(str(_digest(one)) for one in thing))
    return digest(repr(thing))


def check_same_gradients(ranks: Ranks, layers: Mapping[str, SparseLinear]) -> None:
    """Raise RuntimeError, the same on all ranks, where each has a gradient of its own."""
    if ranks.alone:
        return
    kept = {name: layer for name, layer in layers.items() if not is_sharded(layer.values)}
    norms = torch.zeros(len(kept), dtype=torch.float64)
    for i, layer in enumerate(kept.values()):
        if layer.values.grad is not None:
            norms[i] = _norm(layer.values.grad.detach())
    line = _apart(ranks, list(kept), norms.to(ranks.device))
    if ranks.everyone is ranks:
        if line:
            raise RuntimeError(line)
        return
    with agreeing(ranks):  # lines of a mesh compare for themselves, and all hear of it
        if line:
            raise RuntimeError(line)


def _apart(ranks: Ranks, names: Sequence[str], norms: Tensor) -> str:
    """What to say of the first layer whose norms are not alike on all ranks; "" if they are."""
    ends = ranks.highest(torch.stack([norms, -norms]))
    apart = ((ends[0] + ends[1]) > _ALIKE * ends[0]).nonzero().flatten().tolist()
    if not apart:
        return ""
    i = apart[0]
    own = torch.stack(ranks.gather(norms[i : i + 1], [1] * ranks.size)).flatten().tolist()
    alike = [rank for rank, norm in enumerate(own) if abs(norm - own[0]) <= _ALIKE * own[0]]
    others = [rank for rank in range(ranks.size) if rank not in alike]
    return (
        f"layer {names[i]!r}: {named_ranks(alike)} and {named_ranks(others)} have other "
        "gradients, so they do not train one model: wrap it in DistributedDataParallel, or in "
        "dynsparse.distributed.replicate, or pass ranks=None to train alone"
    )


def _norm(tensor: Tensor) -> Tensor:
    """Its length, in the type that it is added up in quickly and well enough for `_ALIKE`."""
    return tensor.norm(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def reached_by(
    ranks: Ranks, step: int, layers: Mapping[str, SparseLinear], is_reached: Callable[[str], bool]
) -> dict[str, SparseLinear]:
    """The layers through which a backward pass came, on any rank.

    Raises:
        RuntimeError: there are layers, and it is none of them.
    """
    reached = torch.tensor([is_reached(name) for name in layers], dtype=torch.int32)
    somewhere = ranks.highest(reached.to(ranks.device)).tolist()
    found = {n: layers[n] for n, any_ in zip(layers, somewhere, strict=True) if any_}
    if not found and layers:
        raise RuntimeError(
            f"step {step} ends in a pattern update, but no gradient reached any sparse layer since "
            "the step before: call trainer.step() after loss.backward(), and make the trainer "
            "after moving the model to its device"
        )
    return found


def agree_on_patterns(ranks: Ranks, step: int, rewirings: Mapping[str, Rewiring]) -> None:
    """Raise ValueError, the same on all ranks, where the patterns after an update would differ."""
    if ranks.alone:
        return
    names = ", ".join(map(repr, rewirings))
    patterns = {
        f"the pattern of layer {name!r} after step {step}": digest(
            rewiring.after.row_ptr, rewiring.after.cols
        )
        for name, rewiring in rewirings.items()
    }
    if say_the_same(ranks, names, patterns):
        return
    agree_on(ranks, {"the layers that change": names}, _SAME)
    agree_on(
        ranks,
        patterns,
        "change patterns through the trainer alone, and load the same state on every rank",
        shown=False,
    )


def name_of(function: Any) -> str:
    """What tells a function, or a thing that is called like one, from others."""
    kind = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{kind}{vars(function) if hasattr(function, '__dict__') else ''}"
