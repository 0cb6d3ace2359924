"""Optimizer state follows the pattern: survivors keep theirs, grown entries are reset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from dynsparse._core import logs
from dynsparse._core.checks import typed
from dynsparse.nn.sharded import is_sharded
from dynsparse.pattern import Rewiring


@typed
@torch.no_grad()
def rewire_state(optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring) -> None:
    """Apply `rewiring` to every state tensor of the Parameter `values`, in place if its size stays.

    A state tensor with one entry per block ([nnz, ...]) follows the pattern; grown entries get the
    optimizer's initial value, which is mostly zero. Scalars such as Adam's step count belong to the
    whole Parameter and stay. Optimizers that the given one holds, as Lookahead does, are included.

    Where survivors keep their slots, only the entries of grown blocks are written, those of the
    8-bit states of bitsandbytes and torchao as well. Other state (lists, factors) stays right for
    survivors; grown blocks inherit that of the dropped ones, and a RuntimeWarning says so once.

    Raises:
        ValueError: survivors move, and a state is neither a tensor with one entry nor one with an
            entry per block, so that it cannot follow; nothing is changed.
    """
    prepare_tensors(state_entries(optimizer, values, rewiring), rewiring)()


class StateEntry(NamedTuple):
    """A tensor with an entry per block.

    Attributes:
        state, key: the dictionary that holds it, and its key there.
        tensor: itself, or the codes of a quantized one.
        fill: the initial value of a grown entry.
    """

    state: dict[Any, Any]
    key: Any
    tensor: Tensor
    fill: float


@torch.no_grad()
def prepare_tensors(entries: Sequence[StateEntry], rewiring: Rewiring) -> Callable[[], None]:
    """Returns a function that applies `rewiring` to tensors without allocating memory, each in its
    place if its size stays."""
    reused, in_place = rewiring._reused, []
    prepared: list[tuple[StateEntry, Tensor]] = []
    for entry in entries:
        plain = entry.tensor.is_cpu and type(entry.tensor) in (Tensor, torch.nn.Parameter)
        if plain and reused is not None:  # only grown slots are written
            in_place.append(entry)
        else:
            prepared.append((entry, rewiring.apply(entry.tensor, entry.fill)))

    def follow() -> None:
        with torch.no_grad():
            for entry in in_place:
                entry.tensor.index_fill_(0, rewiring.grown, entry.fill)
            for entry, tensor in prepared:
                if rewiring.keeps_size:
                    entry.tensor.copy_(tensor)
                else:
                    entry.state[entry.key] = tensor

    return follow


def nested_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer and those that it holds in attributes, as ZeroRedundancyOptimizer, Lookahead and
    SAM do; the outermost first."""
    optimizers = [optimizer]
    for candidate in optimizers:
        inner = [o for o in vars(candidate).values() if isinstance(o, torch.optim.Optimizer)]
        optimizers += [o for o in inner if not any(o is other for other in optimizers)]
    return optimizers


def states_of(
    optimizer: torch.optim.Optimizer, values: Tensor
) -> Iterator[tuple[torch.optim.Optimizer, dict[Any, Any]]]:
    """What an optimizer, and those that it holds, keep of `values`; each with its state."""
    seen: set[int] = set()
    for candidate in nested_optimizers(optimizer):
        state = candidate.state.get(values)
        if state and id(state) not in seen:
            seen.add(id(state))
            yield candidate, state


def state_entries(
    optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring
) -> list[StateEntry]:
    """The state tensors of `values` with an entry per block.

    Raises:
        ValueError: as `rewire_state`.
    """
    entries: list[StateEntry] = []
    nnz = rewiring.before.nnz
    for holder, state in states_of(optimizer, values):
        for key, value in state.items():
            codes = _quantized_entry(state, key) if rewiring.keeps_slots else None
            # Of another class it may be quantized.
            plain = type(value) in (Tensor, torch.nn.Parameter, type(values.data))
            plain = plain or is_sharded(value)
            if codes is not None:
                entries.append(codes)
            elif plain and value.dim() and len(value) == nnz:
                fill = _initial_entry(holder, values, key)
                entries.append(StateEntry(state, key, value, fill))
            elif not _is_shared(value) and not (rewiring.keeps_slots and _is_scale(key)):
                _refuse_or_warn(holder, key, value, rewiring)
    return entries


def _quantized_entry(state: dict[Any, Any], key: Any) -> StateEntry | None:
    """An 8-bit state with a code per weight: bitsandbytes' "state1" beside "qmap1", a table of what
    codes stand for; torchao's tensors with `codes` and, unless they are float8, `qmap`."""
    value = state[key]
    table = state.get(key.replace("state", "qmap")) if isinstance(key, str) else None
    if isinstance(table, Tensor) and table is not value:
        codes = value
    else:
        codes, table = getattr(value, "codes", None), getattr(value, "qmap", None)
    if not isinstance(codes, Tensor) or codes.shape != value.shape or codes.itemsize != 1:
        return None
    zero = 0.0 if table is None else float(table.abs().argmin())
    return StateEntry(state, key, codes.view(torch.uint8), zero)


def _is_scale(key: Any) -> bool:
    """Whether this is bitsandbytes' scale of blocks of weights, or its table of codes."""
    return isinstance(key, str) and key.startswith(("absmax", "qmap"))


def _refuse_or_warn(
    optimizer: torch.optim.Optimizer, key: Any, state: Any, rewiring: Rewiring
) -> None:
    shape = f" of shape {list(state.shape)}" if isinstance(state, Tensor) else ""
    what = f"{type(optimizer).__name__} keeps the state {key!r}{shape}, "
    if not rewiring.keeps_slots:
        raise ValueError(
            f"{what}which does not follow the {rewiring.before.nnz} blocks of the layer: use an "
            "optimizer that keeps one entry per weight"
        )
    if optimizer not in _warned:
        _warned.add(optimizer)
        logs.warn(
            f"{what}whose entries for grown weights are unknown: grown weights start with "
            "what the dropped ones left there",
            RuntimeWarning,
        )


_warned: WeakSet[torch.optim.Optimizer] = WeakSet()


def _is_shared(state: Any) -> bool:
    """Whether none of it belongs to single weights, as a step count."""
    if isinstance(state, Tensor):
        return state.numel() <= 1
    if isinstance(state, Mapping):
        return all(map(_is_shared, state.values()))
    return not isinstance(state, (list, tuple)) or all(map(_is_shared, state))


def _initial_entry(optimizer: torch.optim.Optimizer, values: Tensor, key: str) -> float:
    """The initial value of an entry of the state `key`."""
    fresh = getattr(optimizer, "fresh", {})  # of adapters of other libraries' optimizers
    if key in fresh:
        return float(fresh[key])
    if isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        option = "initial_accumulator_value"
    elif isinstance(optimizer, torch.optim.Rprop) and key == "step_size":
        option = "lr"
    else:
        return 0.0
    group = next(g for g in optimizer.param_groups if any(p is values for p in g["params"]))
    return float(group[option])


def check_optimizer(optimizer: torch.optim.Optimizer, layers: dict[str, Tensor]) -> None:
    """Check that `optimizer` can train these values (name -> Parameter) while patterns change.

    Raises:
        TypeError: not an optimizer of torch, or one whose state is no longer per weight (LBFGS).
        ValueError: a layer's values are in none of its parameter groups.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS mixes all weights in its state, which cannot follow a pattern")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, values in layers.items():
        if values.requires_grad and id(values) not in held:
            raise ValueError(
                f"the optimizer does not hold the values of layer {name!r}: make it from "
                "model.parameters() after the model has become sparse"
            )


def learning_rate_of(optimizer: torch.optim.Optimizer, values: Tensor) -> float:
    """The learning rate of the parameter group that holds `values`.

    Raises:
        ValueError: no group does, or the group has no learning rate.
    """
    for group in optimizer.param_groups:
        if any(parameter is values for parameter in group["params"]):
            if "lr" not in group:
                raise ValueError(f"{type(optimizer).__name__} has no learning rate")
            return float(group["lr"])
    raise ValueError("the optimizer does not hold the values of this layer")
