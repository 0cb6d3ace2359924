"""A module with one sparse weight, whose pattern may change at any time."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from dynsparse.interrupts import uninterrupted
from dynsparse.nn.backends import Executor
from dynsparse.nn.copies import is_averaging
from dynsparse.nn.layer_state import LayerState, changing
from dynsparse.nn.sharded import gathered, is_sharded, whole
from dynsparse.ops import capture
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.panels import discard_panels
from dynsparse.pattern import PatternIndex, Rewiring, SparsePattern
from dynsparse.ranks import DimShard, ShardSpec

# The layer that each Parameter of values belongs to.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


class SparseModule(nn.Module):
    """Holds the values of a sparse weight and their pattern, and keeps them together.

    What a subclass must do: register the Parameter `values`, then call `_install(pattern)`.
    """

    values: nn.Parameter
    _pattern: SparsePattern

    resizable: bool = False
    executor: Executor | None = None
    # The index is no buffer: buffers are averaged, broadcast and written to by others. It is made
    # of the pattern for the device of the values, and `rows` and `cols` are in the state dict.
    _state: LayerState | None = None
    # Rows and columns that were put in place of the layer's own, as `functional_call` does it.
    _given: dict[str, Tensor] | None = None
    # The index of the layer's own pattern meanwhile.
    _aside: LayerIndex | None = None
    # The row pointers of the index, by which `ops.capture` knows the layer. They stay while the
    # pattern stays, also where the rest of the index is given up or made anew.
    _row_ptr: Tensor | None = None
    # The name that `sparsify` found it under, for messages; and whether one has been given already.
    known_as: str | None = None
    told_of_dense_weight: bool = False
    # The other sharded tensors of a tensor-parallel layer: name -> their shard and its dimension.
    dim_shards: dict[str, tuple[DimShard, int]]
    # Whether another pattern was loaded: a trainer looks before its next step.
    _was_replaced: bool = False
    # Averages of this layer, which take its patterns.
    _followers: tuple[weakref.ref[SparseModule], ...] = ()

    @property
    def pattern(self) -> SparsePattern:
        """Which blocks are present; change it with `set_pattern` or `rewire`."""
        return self._pattern

    @property
    def block_size(self) -> int:
        return self._pattern.block_size

    @property
    def is_on_device(self) -> bool:
        """Whether values and index are not on the CPU, so that nothing may synchronise."""
        state = self._state
        return state is not None and not state.index.on_cpu

    @property
    def density(self) -> float:
        """Present blocks / all blocks."""
        return self._pattern.density

    @property
    def index(self) -> PatternIndex:
        """The kernels' index tensors, on the device of the values; not to be written to."""
        state = self._state
        return (self._refresh() if state is None else state).index.index

    @property
    def rows(self) -> Tensor:
        """Block rows of the slots, int32 [nnz], on the device of the values."""
        return self._shown("rows")

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self._give("rows", rows)

    @property
    def cols(self) -> Tensor:
        """Block columns of the slots, int32 [nnz], on the device of the values."""
        return self._shown("cols")

    @cols.setter
    def cols(self, cols: Tensor) -> None:
        self._give("cols", cols)

    def _shown(self, name: str) -> Tensor:
        given = None if self._given is None else self._given.get(name)
        own: Tensor = getattr(self._pattern, name)
        return own.to(self.values.device) if given is None else given

    def _give(self, name: str, tensor: Tensor) -> None:
        # torch's functional calls put the tensors of a state dict in place for one call, and put
        # back what they found. Others change the pattern through `set_pattern`.
        given = {**(self._given or {}), name: tensor}
        own = {n: t for n, t in given.items() if torch.equal(t.cpu(), getattr(self._pattern, n))}
        self._given = None if len(own) == len(given) else given
        if self._state is not None:
            self._aside, self._state = self._state.index, None

    def held(self) -> tuple[Tensor, PatternIndex]:
        """Values and index tensors that belong together, whatever other threads do.

        The values are the Parameter where gradients are recorded, which only the thread that
        changes the pattern should do, and its memory otherwise.
        """
        if torch.is_grad_enabled() or is_compiling():
            return whole(self.values), self.index
        state = self._current()
        return whole(state.memory), state.index.index

    def _current(self) -> LayerState:
        state, values = self._state, self.values
        if (
            state is None
            or state.address != values.data_ptr()
            or state.version != state.watched._version
        ):
            state = self._refresh()
        return state

    def _refresh(self) -> LayerState:
        """The state as it is now: after a change, a move, or memory that was replaced."""
        with changing:
            values = self.values
            pattern, before = self._pattern, self._state
            if before is not None and before.version != before.watched._version:
                raise RuntimeError(
                    "somebody has written to the index of this layer, which then no longer belongs "
                    "to its values: change patterns with set_pattern() or rewire(), and load the "
                    "layer anew"
                )
            if self._given is not None:
                found = {"rows": pattern.rows, "cols": pattern.cols, **self._given}
                pattern = SparsePattern._in_order(
                    **found, shape=pattern.shape, block_size=self.block_size
                )
                return LayerState(pattern, values, None)
            index = self._aside if before is None else before.index
            self._check_owner()
            state = LayerState(pattern, values, index, self._row_ptr)
            self._row_ptr = state.index.row_ptr
            if state.index.on_cpu:
                pattern._detach()
            else:
                pattern._attach(state.index.index)
            self._state, self._aside = state, None
            return state

    def _check_owner(self) -> None:
        owner = _owners.get(self.values, weakref.ref(self))()
        if owner is None or owner is self:
            _owners[self.values] = weakref.ref(self)
        elif not owner._pattern._has_slots_of(self._pattern):
            raise RuntimeError(
                "this layer was given the values of another sparse layer, whose pattern is a "
                "different one: pass rows and cols with them, as in the other layer's state_dict()"
            )

    def _install(self, pattern: SparsePattern, values: Tensor | None = None) -> None:
        """Change over to a pattern, and to values of its own where there are any."""
        self._was_replaced = True
        self._give_up_index()
        self._prepared(pattern, values)()

    def _give_up_index(self) -> None:
        """The largest array of an update: whoever wants it still makes it anew. Off the CPU its
        memory serves the next pattern."""
        if self._state is not None and self._state.index.on_cpu:
            self._state = None

    def _prepared(self, pattern: SparsePattern, values: Tensor | None) -> Callable[[], None]:
        """What changes over to a pattern and its values, and takes no memory to do so."""
        own: SparsePattern | None = vars(self).get("_pattern")  # none while the layer is made
        if own is not None and self.keeps_slots and own.nnz == pattern.nnz:
            # No tensor changes its size, so that nothing is compiled or captured anew.
            pattern = pattern if own._is_row_major else pattern._with_slots()
        before = self._state
        kept = None
        if before is None and own is not None and own._has_slots_of(pattern):
            kept = self._row_ptr
        # Made now, and not in the next call, which a compiler may watch.
        state = LayerState(pattern, self.values if values is None else values, None, kept)
        if before is not None and not before.index.may_take(state.index):
            before = None
        if before is not None:
            state.index.derive_like(before.index)
            left = self._pattern._before_overwrite(before.index.index)
        executor = None if self.executor is None else self.executor.after(pattern)
        followers = [follower for reference in self._followers if (follower := reference())]
        following = []
        for follower in followers:
            follower.resizable = self.resizable
            following.append(follower.prepare(Rewiring.between(follower.pattern, pattern)))

        @torch.no_grad()
        def change_over() -> None:
            with uninterrupted():
                with changing:
                    made = state
                    if before is not None:
                        self._pattern._device_index = left
                        made = before.take(state, pattern, self.values, values)
                    elif values is not None:
                        self._store(values)
                    if not made.index.on_cpu:
                        pattern._attach(made.index.index)
                    row_ptr = made.index.row_ptr
                    if self._row_ptr is not None and self._row_ptr.data_ptr() != row_ptr.data_ptr():
                        capture.replace(self._row_ptr, row_ptr, self.values)
                    self._pattern, self._state, self._row_ptr = pattern, made, row_ptr
                    _owners[self.values] = weakref.ref(self)
                    self._given = self._aside = None
                    self.executor = executor
                for follow in following:
                    follow()

        return change_over

    def _apply(self, fn: Any, recurse: bool = True) -> SparseModule:
        super()._apply(fn, recurse)
        self._refresh()
        return self

    def __getstate__(self) -> dict[str, Any]:
        with changing:
            # Pickle reads the Parameter later, when another thread may have changed the pattern.
            return {**self._state_to_copy(), "_saved": (self._pattern, self.values.detach())}

    def _state_to_copy(self) -> dict[str, Any]:
        # What was made of the pattern stays with this layer: copies have memory of their own.
        own = ("_state", "_aside", "_row_ptr", "_followers")
        return {k: v for k, v in self.__dict__.items() if k not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pattern, values = state.pop("_saved", (None, None))
        super().__setstate__(state)
        if values is not None and values.data_ptr() != self.values.data_ptr():
            self._pattern, self.values.data = pattern, values
        self._refresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseModule:
        made = self.__new__(type(self))
        memo[id(self)] = made
        with changing:
            state = copy.deepcopy(self._state_to_copy(), memo)
        made.__setstate__(state)
        if is_averaging():
            self.lead(made)
        return made

    def lead(self, other: SparseModule) -> None:
        """From now on, `other` takes every pattern of this layer: see `nn.follow_patterns`."""
        alive = (reference for reference in self._followers if reference() is not None)
        self._followers = (*alive, weakref.ref(other))

    def thin_index(self) -> None:
        """Keep only 4 bytes of index per block, where ranks share the values out among each other.

        Backward makes the order by columns each time, and panels and masks are made for one call.
        Trainers do this; after an update it is so anyway. Off the CPU it always is.
        """
        if is_sharded(self.values):
            self._refresh()

    def forget_panels(self) -> None:
        """Give up what kernels for many samples have made of the index, 12 bytes per weight.

        The next product that wants it makes it anew. Trainers do this before they change the
        pattern, after which it would be of no use.
        """
        if self._state is not None:
            discard_panels(self._state.index)

    @torch.no_grad()
    def rewire(self, rewiring: Rewiring, fill: float | Tensor = 0.0) -> None:
        """Apply one pattern update in place: survivors keep their values, grown slots get `fill`.

        The Parameter object stays the same. Optimizer state is not touched; trainers do that.

        Raises:
            ValueError: the rewiring starts from another pattern, or changes the number of blocks of
                a layer that is not `resizable`.
        """
        self.prepare(rewiring, fill)()

    @torch.no_grad()
    def prepare(self, rewiring: Rewiring, fill: float | Tensor = 0.0) -> Callable[[], None]:
        """The two parts of `rewire`: all that takes memory or can fail is done now, and calling
        what is returned changes over. No other change may come in between.

        Raises:
            ValueError: as `rewire`.
        """
        if not self._pattern._has_slots_of(rewiring.before):
            raise ValueError(
                f"the rewiring starts from {rewiring.before}, the layer holds {self._pattern}"
            )
        values = whole(self.values)
        self._check_capacity(rewiring.after)
        # Beside the old values, which other threads may be reading. The order by columns is given
        # up before, as it is the largest array here: whoever wants it still makes it anew.
        self._pattern.forget_index()
        self._give_up_index()
        moved = rewiring.apply(values.detach(), fill)
        return self._prepared(rewiring.after, moved)

    @torch.no_grad()
    def set_pattern(self, pattern: SparsePattern, values: Tensor | None = None) -> None:
        """Change the pattern in place, to one of the same shape and block size, and of the same
        number of blocks unless the layer is `resizable`.

        Without `values` ([nnz] or [nnz, b, b]) blocks present before and after keep theirs and new
        ones start at zero.
        """
        self._check_capacity(pattern)
        if values is None:
            self.rewire(Rewiring.between(self._pattern, pattern))
            return
        pattern._check_values(values)
        self._install(pattern, values.to(whole(self.values), copy=True))

    def prepare_moved(self, pattern: SparsePattern) -> Callable[[], None]:
        """What changes over to a pattern where others see to the values: sharded ones move from
        rank to rank. In two parts as `prepare`."""
        self._check_capacity(pattern)
        self._pattern.forget_index()
        return self._prepared(pattern, None)

    def _store(self, values: Tensor) -> None:
        """Take over the memory of values [any] or [any, b, b]; the Parameter stays the same."""
        own = self.values
        if values.shape != own.shape:
            own.grad = None  # it belongs to the old length
            # A graph that is still alive, as that of the last loss, keeps the node that accumulates
            # the gradient, and with it the old length. Autograd makes a new one when the type
            # changes.
            other = torch.float32 if own.dtype == torch.float64 else torch.float64
            own.data = own.data.new_empty(0, dtype=other)
        else:
            own[:0].zero_()  # a graph that waits for its backward pass learns of the change
        own.data = values

    @property
    def may_resize(self) -> bool:
        """Whether the number of blocks on this rank may change: that of a shard does while that of
        the full layer stays."""
        return self.resizable or isinstance(self.executor, ShardSpec)

    @property
    def keeps_slots(self) -> bool:
        """Whether slots may have any order, so that survivors of an update stay where they are.
        Rectangles and targets need row-major order."""
        return self.executor is (None if self.executor is None else getattr(self, "active", None))

    def _check_capacity(self, pattern: SparsePattern) -> None:
        own = self._pattern
        alike = (pattern.shape, pattern.block_size) == (own.shape, own.block_size)
        resizable = self.may_resize
        if is_sharded(self.values):
            resizable = isinstance(self.executor, ShardSpec)
        if not alike or (pattern.nnz != own.nnz and not resizable):
            raise ValueError(
                f"the layer holds {own}; the new pattern must have the same shape, block size and "
                f"number of blocks, got {pattern}"
            )
        if not (self.keeps_slots or pattern._is_row_major):
            raise ValueError(
                "rows and cols are not in row-major order, which rectangles and targets need: "
                "make rewirings with row_major=True"
            )

    def to_dense(self) -> Tensor:
        """The weight as an [out, in] tensor, differentiable in the values.

        Where the values are sharded, all ranks must call it. A backward pass through it raises
        RuntimeError once the pattern has changed.
        """
        if is_compiling() or is_sharded(self.values):  # no compiler traces locks and hooks
            return self._pattern.to_dense(gathered(self.values))
        with changing:
            pattern = self._pattern
            dense = pattern.to_dense(self.values)
        if dense.requires_grad:
            dense.register_hook(lambda _: self._check_unchanged(pattern))
        return dense

    def _check_unchanged(self, pattern: SparsePattern) -> None:
        if self._pattern is not pattern and not self._pattern._has_slots_of(pattern):
            raise RuntimeError(capture.CHANGED)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        with changing:
            self._load(*arguments)

    def _load(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        # The pattern is in the state too: it is taken over when all of it fits, or nothing is.
        rows, cols = state_dict.get(prefix + "rows"), state_dict.get(prefix + "cols")
        if rows is not None and cols is not None:
            try:
                pattern = SparsePattern._in_order(
                    rows, cols, shape=self._pattern.shape, block_size=self.block_size
                )
                self._check_capacity(pattern)
            except (TypeError, ValueError) as error:
                error_msgs.append(f"the pattern of {prefix or 'the layer'!r} does not fit: {error}")
                return
            values = state_dict.get(prefix + "values")
            with torch.no_grad():
                if values is None or is_sharded(self.values) or is_sharded(values):
                    self._install(pattern)
                elif values.shape == pattern.values_shape:
                    # Memory of their own, so that other threads see pattern and values together.
                    self._install(pattern, values.to(self.values, copy=True))
        elif prefix + "values" in state_dict:
            error_msgs.append(
                f"the state has {prefix}values without {prefix}rows and {prefix}cols, so they may "
                "belong to another pattern: save and load the three together"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        for name in ("rows", "cols"):
            if prefix + name in unexpected_keys:
                unexpected_keys.remove(prefix + name)
            if strict and prefix + name not in state_dict:
                missing_keys.append(prefix + name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with changing:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            pattern = self._pattern
        # Copies: who loads into a state dict in place does not write into the pattern.
        for name in ("rows", "cols"):
            destination[prefix + name] = getattr(pattern, name).to(self.values.device, copy=True)
