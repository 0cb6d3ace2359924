"""Optimizer state follows the pattern: survivors keep theirs, grown entries are reset."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from numbers import Number
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from dynsparse._core import logs
from dynsparse._core.checks import check_types
from dynsparse.nn.sharded import is_sharded
from dynsparse.pattern import Rewiring


@check_types
@torch.no_grad()
def rewire_state(optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring) -> None:
    """Apply `rewiring` to every state tensor of the Parameter `values`, in place if its size stays.

    A state tensor with one entry per block ([nnz, ...]) follows the pattern; grown entries get the
    optimizer's initial value, which is mostly zero. Scalars such as Adam's step count belong to the
    whole Parameter and stay. Optimizers that the given one holds, as Lookahead does, are included.

    Where survivors keep their slots, only the entries of grown blocks are written, those of the
    8-bit states of bitsandbytes and torchao as well. Other state (lists, factors, objects) stays
    right for survivors; grown blocks inherit that of the dropped ones, and a RuntimeWarning says so
    once.

    Raises:
        ValueError: survivors move, and a state is neither a tensor with one entry nor one with an
            entry per block, so that it cannot follow; nothing is changed.
    """
    prepare_tensors(state_entries(StateHolders.of(optimizer), values, rewiring), rewiring)()


class StateEntry(NamedTuple):
    """A tensor with an entry per block.

    Attributes:
        state, key: the dictionary that holds it, and its key there.
        tensor: the tensor, or the codes of a quantized tensor.
        fill: the initial value of grown entries: a number, or a tensor that `Rewiring.apply` takes.
    """

    state: dict[Any, Any]
    key: Any
    tensor: Tensor
    fill: float | Tensor


@torch.no_grad()
def prepare_tensors(entries: Sequence[StateEntry], rewiring: Rewiring) -> Callable[[], None]:
    """Returns a function that applies `rewiring` to tensors without allocating memory, each in its
    place if its size stays."""
    in_place: list[tuple[Tensor, float]] = []  # only grown slots are written
    prepared: list[tuple[StateEntry, Tensor]] = []
    for entry in entries:
        if not isinstance(entry.fill, Tensor) and rewiring._can_write_grown(entry.tensor):
            in_place.append((entry.tensor, entry.fill))
        else:
            prepared.append((entry, rewiring.apply(entry.tensor, entry.fill)))

    def follow() -> None:
        with torch.no_grad():
            for tensor, fill in in_place:
                rewiring._write_grown(tensor, fill)
            for entry, tensor in prepared:
                if rewiring.keeps_size:
                    entry.tensor.copy_(tensor)
                else:
                    entry.state[entry.key] = tensor

    return follow


def nested_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer and those that it holds, as ZeroRedundancyOptimizer, Lookahead and SAM do, in
    attributes or in lists, tuples and dictionaries there; the outermost first."""
    optimizers = [optimizer]
    for candidate in optimizers:
        for attribute in vars(candidate).values():
            inner = attribute.values() if isinstance(attribute, dict) else attribute
            for value in inner if isinstance(attribute, (list, tuple, dict)) else [attribute]:
                if isinstance(value, torch.optim.Optimizer) and all(
                    value is not other for other in optimizers
                ):
                    optimizers.append(value)
    return optimizers


class StateHolders(NamedTuple):
    """Where the state of a Parameter may be.

    Attributes:
        optimizers: an optimizer and those that it holds.
        named: their states under keys that are no Parameters, as TRAC has, each with its optimizer
            and key.
    """

    optimizers: list[torch.optim.Optimizer]
    named: list[tuple[torch.optim.Optimizer, Any, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> StateHolders:
        optimizers = nested_optimizers(optimizer)
        named = {
            id(state): (holder, key, state)
            for holder in reversed(optimizers)
            for key, state in getattr(holder, "state", {}).items()
            if not isinstance(key, Tensor)
        }
        return cls(optimizers, [*named.values()])

    def states_of(self, values: Tensor) -> Iterator[tuple[torch.optim.Optimizer, dict[Any, Any]]]:
        """Yield every optimizer that keeps state of `values`, with this state."""
        seen: set[int] = set()
        for candidate in self.optimizers:
            state = getattr(candidate, "state", {}).get(values)
            if state and id(state) not in seen:
                seen.add(id(state))
                yield candidate, state


def states_of(
    optimizer: torch.optim.Optimizer, values: Tensor
) -> Iterator[tuple[torch.optim.Optimizer, dict[Any, Any]]]:
    """Yield every optimizer that keeps state of `values` (the given one or one that it holds), with
    this state."""
    return StateHolders.of(optimizer).states_of(values)


def state_entries(
    holders: StateHolders,
    values: Tensor,
    rewiring: Rewiring,
    grown: float | Tensor = 0.0,
) -> list[StateEntry]:
    """The state tensors of `values` with an entry per block.

    Args:
        holders: of the optimizer that trains them.
        grown: the initial values of grown weights, which copies and averages of the weights get.

    Raises:
        ValueError: as `rewire_state`.
    """
    entries: list[StateEntry] = []

    def add(holder: torch.optim.Optimizer, state: Any, key: Any, name: Any) -> None:
        value = state[key]
        codes = _quantized_entry(state, key) if rewiring.keeps_slots else None
        # A tensor of another class may be quantized.
        plain = type(value) in (Tensor, torch.nn.Parameter, type(values.data))
        plain = plain or is_sharded(value)
        if codes is not None:
            entries.append(codes)
        elif plain and _has_entry_per_block(value, values, rewiring.before.nnz):
            if value.shape == values.shape and _copies_weights(state, name):
                fill = grown.to(value.dtype) if isinstance(grown, Tensor) else grown
            else:
                fill = _initial_entry(holder, values, name)
            entries.append(StateEntry(state, key, value, fill))
        elif not _is_shared(value) and not (rewiring.keeps_slots and _is_scale(key)):
            _refuse_or_warn(holder, name, value, rewiring)

    for holder, state in holders.states_of(values):
        for key in state:
            add(holder, state, key, key)
    for holder, name, state in holders.named:
        if isinstance(state, Mapping) and values in state:
            add(holder, state, values, name)
        elif _holds_entries(state, values):
            _refuse_or_warn(holder, name, state, rewiring)
    return entries


def _has_entry_per_block(state: Tensor, values: Tensor, nnz: int) -> bool:
    """Whether a tensor is [nnz, ...], and not [nnz, nnz] as a factor of Shampoo's."""
    if not state.dim() or len(state) != nnz:
        return False
    sizes = zip_longest(reversed(state.shape[1:]), reversed(values.shape[1:]), fillvalue=1)
    return all(size in (1, of_block) for size, of_block in sizes)


def _holds_entries(state: Any, values: Tensor) -> bool:
    """Whether state of no Parameter holds tensors with as many entries as `values`."""
    if isinstance(state, Tensor):
        return state.numel() > 1 and state.numel() == values.numel()
    if isinstance(state, Mapping):
        state = [value for key, value in state.items() if not isinstance(key, Tensor)]
    return isinstance(state, _SEQUENCES) and any(_holds_entries(value, values) for value in state)


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
    if isinstance(state, _SEQUENCES):
        return all(map(_is_shared, state))
    return state is None or isinstance(state, (Number, str, torch.dtype, torch.device))


_SEQUENCES = (list, tuple, deque)


def _copies_weights(state: Mapping[Any, Any], key: Any) -> bool:
    """Whether the state `key` is a copy or an average of the weights."""
    if key == "z":  # of schedule-free optimizers; that of FTRL, beside "n", is a sum of gradients
        return "n" not in state
    return key in _WEIGHTS


_WEIGHTS = {
    *("slow_param", "slow_params", "slow_buffer", "lookahead_params", "lookahead_slow_buff"),
    *("p0", "x0", "trac"),  # where Prodigy, MADGRAD and DAdapt, and TRAC began
    *("x_k", "prev_param", "shadow"),  # of A2Grad, AdaSmooth, EmoNavi
}


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
        kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        line = f"expected a torch.optim.Optimizer, got {kind.removeprefix('builtins.')}"
        if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            line += ", a wrapper with state of its own, whose steps cannot be followed"
        elif isinstance(getattr(optimizer, "opt", None), torch.optim.Optimizer):  # of fastai
            line += ": pass the optimizer that it holds, its .opt"
        raise TypeError(line)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS mixes all weights in its state, which cannot follow a pattern")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, values in layers.items():
        if values.requires_grad and id(values) not in trained:
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
