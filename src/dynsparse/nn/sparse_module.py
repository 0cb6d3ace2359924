"""The base class of sparse layers: one sparse weight, whose pattern may change at any time."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from multiprocessing.context import get_spawning_popen
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from dynsparse._core.interrupts import defer_signals
from dynsparse.nn.backends import Executor
from dynsparse.nn.copies import (
    Snapshot,
    check_copy,
    find_holders,
    is_made_to_follow,
    note_holder,
    warn_of_shared_memory,
)
from dynsparse.nn.layer_state import LayerState
from dynsparse.nn.owners import (
    check_given,
    check_owner,
    drop_references,
    find_equal_pattern,
    set_owner,
)
from dynsparse.nn.sharded import gather_full, is_sharded, require_unsharded
from dynsparse.ops import capture
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.panels import discard_panels
from dynsparse.ops.torch_internals import distributed_caller
from dynsparse.pattern import PatternIndex, Rewiring, SparsePattern
from dynsparse.ranks import DimShard, ShardSpec, check_consistent, digest, ranks_of


def trace_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Trace the call of a module with a `torch.fx.Proxy` as one node of the graph, as for layers of
    torch.nn: the graph follows the module's pattern."""
    tracer = args[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)


# Held while values and pattern of a layer change or are read together. One lock for all layers, as
# it is held only for moments.
update_lock = threading.RLock()


class SparseModule(nn.Module):
    """Holds the values of a sparse weight and their pattern, and keeps them consistent.

    A subclass registers the Parameter `values`, then calls `_install(pattern)`.
    """

    values: nn.Parameter
    _pattern: SparsePattern

    resizable: bool = False
    executor: Executor | None = None
    # The index is not a buffer because buffers are averaged, broadcast and overwritten. It is
    # derived from the pattern on the device of the values; the state dict has `rows` and `cols`.
    _state: LayerState | None = None
    # Rows and columns that `functional_call` substitutes for those of the layer.
    _substitutes: dict[str, Tensor] | None = None
    # The index of the layer's own pattern while others are substituted.
    _own_index: LayerIndex | None = None
    # The row pointers of the index, by which `ops.capture` identifies the layer. They stay the same
    # as long as the pattern does, even if the rest of the index is released or rebuilt.
    _row_ptr: Tensor | None = None
    # The name in the model, for messages, and whether use of the dense weight was warned about.
    _module_name: str | None = None
    _has_warned: bool = False
    # The other sharded tensors of a tensor-parallel layer: name -> their shard and its dimension.
    dim_shards: dict[str, tuple[DimShard, int]]
    # Whether `state_dict` omits rows and cols, while the layer is loaded from a file.
    _omits_pattern: bool = False
    # Whether its pattern or values were replaced, which a trainer checks before its next step.
    _was_replaced: bool = False
    # Copies of this layer, such as averages, which follow its pattern, the layer that this one
    # follows, and copies that do not follow.
    _followers: tuple[weakref.ref[SparseModule], ...] = ()
    _followed: weakref.ref[SparseModule] | None = None
    _other_copies: tuple[weakref.ref[SparseModule], ...] = ()
    # Of a copy that does not follow, its values as it was made or loaded, or as its original's
    # pattern changed, until its own pattern is changed.
    _values_as_copied: Snapshot | None = None

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
        """The kernels' index tensors on the device of the values; read-only."""
        state = self._state
        return (self._refresh() if state is None else state).index.index

    @property
    def rows(self) -> Tensor:
        """Block rows of the slots, int32 [nnz], on the device of the values."""
        return self._index_tensor("rows")

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self._substitute("rows", rows)

    @property
    def cols(self) -> Tensor:
        """Block columns of the slots, int32 [nnz], on the device of the values."""
        return self._index_tensor("cols")

    @cols.setter
    def cols(self, cols: Tensor) -> None:
        self._substitute("cols", cols)

    def _index_tensor(self, name: str) -> Tensor:
        substitute = None if self._substitutes is None else self._substitutes.get(name)
        tensor: Tensor = getattr(self._pattern, name)
        return tensor.to(self.values.device) if substitute is None else substitute

    def _substitute(self, name: str, tensor: Tensor) -> None:
        # torch's functional calls substitute the tensors of a state dict for one call, and restore
        # the originals. All other changes of the pattern go through `set_pattern`.
        tensors = {**(self._substitutes or {}), name: tensor}
        unchanged = {
            n: t for n, t in tensors.items() if torch.equal(t.cpu(), getattr(self._pattern, n))
        }
        self._substitutes = None if len(unchanged) == len(tensors) else tensors
        if self._state is not None:
            self._own_index, self._state = self._state.index, None

    def snapshot(self) -> tuple[Tensor, PatternIndex]:
        """Return values and index tensors of the same moment, whatever other threads do.

        With gradients enabled the values are the Parameter, and only the thread that changes the
        pattern should call this; otherwise they are its memory.
        """
        values = require_unsharded(self.values)
        if is_compiling():
            return values, self.index
        if type(values) is not nn.Parameter:
            check_given(self, values)  # before the state takes their address
            if torch.is_grad_enabled():
                return values, self.index
        elif torch.is_grad_enabled():
            return values, self._current().index.index
        state = self._current()
        return require_unsharded(state.memory), state.index.index

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
        """Rebuild the state after a change of pattern, device, or memory of the values."""
        with update_lock:
            values = self.values
            pattern, before = self._pattern, self._state
            if before is not None and before.version != before.watched._version:
                raise RuntimeError(
                    "the index of this layer was written to and no longer belongs to its values: "
                    "change patterns with set_pattern() or rewire(), and reload the layer"
                )
            if self._substitutes is not None:
                tensors = {"rows": pattern.rows, "cols": pattern.cols, **self._substitutes}
                pattern = SparsePattern._from_slot_coordinates(
                    **tensors, shape=pattern.shape, block_size=self.block_size
                )
                return LayerState(pattern, values, None)
            index = self._own_index if before is None else before.index
            check_owner(self)
            state = LayerState(pattern, values, index, self._row_ptr)
            self._row_ptr = state.index.row_ptr
            if state.index.on_cpu:
                pattern._detach()
            else:
                pattern._attach(state.index.index)
            self._state, self._own_index = state, None
            return state

    def _install(
        self, pattern: SparsePattern, values: Tensor | None = None, keep_size: bool = True
    ) -> None:
        """Switch to a pattern, and to its `values` if given; see `_prepare_change`."""
        self._was_replaced = True
        self._release_index()
        self._prepare_change(pattern, values, keep_size)()

    def _release_index(self) -> None:
        """Free the index, the largest array of an update, on the CPU; it is rebuilt on demand. On
        other devices its memory is reused for the next pattern."""
        if self._state is not None and self._state.index.on_cpu:
            self._state = None

    def _prepare_change(
        self,
        pattern: SparsePattern,
        values: Tensor | None,
        keep_size: bool = True,
        index: LayerIndex | None = None,
        write: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """Allocate what a switch to a pattern and its values needs, and return the switch. With
        `keep_size` a layer with explicit slots gets some even for row-major order.

        Args:
            index: that of the pattern, from `make_next_indexes`.
            write: writes values in place, in the switch.
        """
        current: SparsePattern | None = vars(self).get("_pattern")  # None in the constructor
        if keep_size and current is not None and self.keeps_slots and current.nnz == pattern.nnz:
            # No tensor changes its size, so nothing is recompiled or recaptured.
            pattern = pattern if current._is_row_major else pattern._to_explicit_slots()
        before = self._state
        row_ptr = None
        if before is None and current is not None and current._has_slots_of(pattern):
            row_ptr = self._row_ptr
        state = None
        if index is None or before is None:  # made now because the next call may be compiled
            state = LayerState(pattern, self.values if values is None else values, None, row_ptr)
            index = state.index
        if before is not None and not before.index.can_copy_from(index):
            before = None
        if before is not None:
            index.derive_like(before.index)
            saved_index = self._pattern._save_before_overwrite(before.index.index)
        executor = None if self.executor is None else self.executor.for_pattern(pattern)
        if current is not None:
            self._check_copies()
            if values is not None:
                warn_of_shared_memory(self.values)
        switches = []
        for follower in self._find_followers():
            follower.resizable = self.resizable
            switches.append(follower.prepare(Rewiring.between(follower.pattern, pattern)))

        def switch() -> None:
            with torch.no_grad(), defer_signals():
                with update_lock:
                    if before is not None:
                        held = self._pattern._device_index
                        if held is not None and held[1] is before.index.cols:
                            self._pattern._device_index = saved_index
                        new = before.copy_from(index, pattern, self.values, values)
                    else:
                        assert state is not None
                        new = state
                        if values is not None:
                            self._store(values)
                    if write is not None:
                        write()
                    if not new.index.on_cpu:
                        pattern._attach(new.index.index)
                    row_ptr = new.index.row_ptr
                    if self._row_ptr is not None and self._row_ptr.data_ptr() != row_ptr.data_ptr():
                        capture.replace(self._row_ptr, row_ptr, self.values)
                    self._replace_snapshot(None)
                    # Assigning them as attributes of a module takes ten times as long.
                    vars(self).update(
                        _pattern=pattern, _state=new, _row_ptr=row_ptr, executor=executor,
                        _substitutes=None, _own_index=None,
                    )  # fmt: skip
                    set_owner(self)
                    note_holder(self)
                for follow in switches:
                    follow()

        return switch

    def __prepare_scriptable__(self) -> None:
        raise NotImplementedError(
            f"torch.jit.script does not compile sparse layers such as {type(self).__name__}: use "
            "torch.compile, torch.jit.trace, or dynsparse.densify first"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> SparseModule:
        self._permit_swap()
        super()._apply(fn, recurse)
        self._refresh()
        return self

    def _permit_swap(self) -> None:
        """Drop weak references to the values and their gradient, which torch swaps only without
        them if `set_swap_module_params_on_conversion` is set."""
        if torch.__future__.get_swap_module_params_on_conversion():
            values = self.values
            drop_references(values)
            if values.grad is not None:
                values.grad = values.grad.detach()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers; for functions of torch.distributed.checkpoint that rename entries of a
        state dict also rows and cols."""
        caller = distributed_caller()
        if caller is not None and caller.f_code.co_name == "_get_managed_states":
            self._check_before_sharding(caller)
        elif caller is not None:
            index = ((name, self._index_tensor(name)) for name in ("rows", "cols"))
            return chain(super().named_buffers(*args, **kwargs), index)
        return super().named_buffers(*args, **kwargs)

    def _check_before_sharding(self, caller: FrameType | None) -> None:
        """Refuse `fully_shard` where ranks have different patterns: values would be gathered into
        positions of another rank. All ranks call it."""
        while caller is not None and caller.f_code.co_name != "fully_shard":
            caller = caller.f_back
        mesh = None if caller is None else caller.f_locals.get("mesh")
        if mesh is None:
            return
        pattern = self._pattern
        digests: dict[str, str | int] = {
            "the pattern of a sparse layer": digest(pattern.rows, pattern.cols, repr(pattern))
        }
        advice = (
            "seed the ranks alike before they make the model, or call "
            "dynsparse.distributed.replicate(model) before fully_shard"
        )
        for dimension in range(mesh.ndim):
            check_consistent(ranks_of(mesh.get_group(dimension)), digests, advice, shown=False)

    def __getstate__(self) -> dict[str, Any]:
        with update_lock:
            state = self._state_to_copy()
            # Pickle reads the Parameter later, after other threads may have changed the pattern.
            # To a process that is being spawned torch sends each memory once.
            if get_spawning_popen() is None:
                state["_saved"] = self._pattern, self.values.detach()
            return state

    def _state_to_copy(self) -> dict[str, Any]:
        # What is derived from the pattern is not copied: copies have their own memory.
        derived = {
            "_state", "_own_index", "_row_ptr", "_followers", "_followed", "_other_copies",
            "_values_as_copied",
        }  # fmt: skip
        return {k: v for k, v in self.__dict__.items() if k not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pattern, values = state.pop("_saved", (None, None))
        super().__setstate__(state)
        if values is not None and values.data_ptr() != self.values.data_ptr():
            self._pattern, self.values.data = pattern, values
        with update_lock:
            note_holder(self)
        self._refresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseModule:
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        with update_lock:
            state = copy.deepcopy(self._state_to_copy(), memo)
        copied.__setstate__(state)
        if is_made_to_follow():
            self.add_follower(copied)
        else:
            copied._values_as_copied = Snapshot(copied.values)
            self._other_copies = tuple(map(weakref.ref, [*_find_alive(self._other_copies), copied]))
        return copied

    def add_follower(self, other: SparseModule) -> None:
        """Let `other` follow every change of this layer's pattern, see `nn.follow_patterns`."""
        self._followers = tuple(map(weakref.ref, [*self._find_followers(), other]))
        other._followed = weakref.ref(self)
        other._replace_snapshot(None)

    def _find_followers(self) -> list[SparseModule]:
        return _find_alive(self._followers)

    def _check_copies(self) -> None:
        """Warn of copies that are written to as averages are, but do not follow the pattern."""
        if self._follows_another:
            return
        with update_lock:
            holders = find_holders(self._pattern)
        known = [o for o in _find_alive(self._other_copies) if o._values_as_copied is not None]
        others = [o for o in {*known, *holders} if o is not self and not o._follows_another]
        self._other_copies = tuple(weakref.ref(other) for other in others if check_copy(other))

    @property
    def _follows_another(self) -> bool:
        return self._followed is not None and self._followed() is not None

    def _replace_snapshot(self, snapshot: Snapshot | None) -> None:
        if self._values_as_copied is not None:
            self._values_as_copied.stop()
        self._values_as_copied = snapshot

    def shrink_index(self) -> None:
        """Keep only 4 bytes of index per block if the values are sharded on CPUs.

        Backward then computes the order by columns at each call, and panels and masks are not
        kept. Trainers call this; every update has the same effect.
        """
        if is_sharded(self.values):
            self._refresh()

    def forget_panels(self) -> None:
        """Free what kernels for many samples derived from the index, 12 bytes per weight.

        It is rebuilt on demand. Trainers call this before they change the pattern, which makes it
        invalid.
        """
        if self._state is not None:
            discard_panels(self._state.index)

    @torch.no_grad()
    def rewire(self, rewiring: Rewiring, fill: float | Tensor = 0.0) -> None:
        """Apply one pattern update in place: survivors keep their values, grown slots get `fill`.

        The Parameter stays the same. A trainer's optimizer state follows at its next step.

        Raises:
            ValueError: the rewiring starts from another pattern, or changes the number of blocks of
                a layer that is not `resizable`.
        """
        self._was_replaced = True
        self.prepare(rewiring, fill)()

    @torch.no_grad()
    def prepare(
        self, rewiring: Rewiring, fill: float | Tensor = 0.0, index: LayerIndex | None = None
    ) -> Callable[[], None]:
        """Do everything of `rewire` that allocates memory or can fail.

        Args:
            index: that of the pattern after it, from `make_next_indexes`.

        Returns:
            A function that performs the change. No other change may come in between.

        Raises:
            ValueError: as `rewire`.
        """
        if not self._pattern._has_slots_of(rewiring.before):
            raise ValueError(
                f"the rewiring starts from {rewiring.before}, the layer holds {self._pattern}"
            )
        values = require_unsharded(self.values)
        self._check_capacity(rewiring.after)
        # The order by columns, the largest array, is freed before; it is rebuilt on demand.
        self._pattern.forget_index()
        self._release_index()
        if self.is_on_device and not isinstance(fill, Tensor) and rewiring._can_write_grown(values):
            write = partial(rewiring._write_grown, values, fill)
            return self._prepare_change(rewiring.after, None, index=index, write=write)
        # New memory, because other threads may be reading the old values.
        moved = rewiring.apply(values.detach(), fill)
        return self._prepare_change(rewiring.after, moved, index=index)

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
        self._install(pattern, values.to(require_unsharded(self.values), copy=True))

    def prepare_pattern(self, pattern: SparsePattern) -> Callable[[], None]:
        """Do the same as `prepare` for a pattern, but leave its values to the caller: sharded
        values move between ranks."""
        self._check_capacity(pattern)
        self._pattern.forget_index()
        return self._prepare_change(pattern, None)

    def _store(self, values: Tensor) -> None:
        """Replace the memory of the Parameter by that of values [any] or [any, b, b]."""
        current = self.values
        if values.shape != current.shape:
            current.grad = None  # it belongs to the old length
            # A graph that is still alive, such as that of the last loss, keeps the node that
            # accumulates the gradient, with the old length. Autograd creates a new one when the
            # dtype changes.
            other = torch.float32 if current.dtype == torch.float64 else torch.float64
            current.data = current.data.new_empty(0, dtype=other)
        else:
            current[:0].zero_()  # autograd detects the change if a backward pass is pending
        current.data = values

    @property
    def can_resize(self) -> bool:
        """Whether the number of blocks on this rank may change; that of a shard may even if that of
        the full layer may not."""
        return self.resizable or self._is_shard

    @property
    def _is_shard(self) -> bool:
        return isinstance(self.executor, ShardSpec)

    @property
    def keeps_slots(self) -> bool:
        """Whether slots may have any order, so that survivors of an update stay in their slots.
        Shards and targets need row-major order."""
        return self.executor is (None if self.executor is None else getattr(self, "active", None))

    def _check_capacity(self, pattern: SparsePattern) -> None:
        current = self._pattern
        alike = (pattern.shape, pattern.block_size) == (current.shape, current.block_size)
        resizable = self.can_resize
        if is_sharded(self.values):
            resizable = self._is_shard
        if not alike or (pattern.nnz != current.nnz and not resizable):
            raise ValueError(
                f"the layer holds {current}; the new pattern must have the same shape, block size "
                f"and number of blocks, got {pattern}"
            )
        if not (self.keeps_slots or pattern._is_row_major):
            raise ValueError(
                "rows and cols are not in row-major order, which shards and targets need: make "
                "rewirings with row_major=True"
            )

    def to_dense(self) -> Tensor:
        """Return the weight as an [out, in] tensor, differentiable in the values.

        If the values are sharded, all ranks must call it. A backward pass through it raises
        RuntimeError after the pattern has changed.
        """
        if is_compiling() or is_sharded(self.values):  # no compiler traces locks and hooks
            return self._pattern.to_dense(gather_full(self.values))
        with update_lock:
            if type(self.values) is nn.Parameter:
                check_owner(self)
            pattern = self._pattern
            dense = pattern.to_dense(self.values)
        if dense.requires_grad:
            dense.register_hook(lambda _: self._check_unchanged(pattern))
        return dense

    def _check_unchanged(self, pattern: SparsePattern) -> None:
        if self._pattern is not pattern and not self._pattern._has_slots_of(pattern):
            raise RuntimeError(capture.CHANGED)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        with update_lock:
            self._load(*arguments)

    def _load(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        # The pattern is part of the state: either all of it fits and is loaded, or nothing is.
        rows, cols = state_dict.get(prefix + "rows"), state_dict.get(prefix + "cols")
        complete = rows is not None and cols is not None
        # If the pattern is the layer's, only the values are loaded, as those of a dense layer.
        if complete and not self._has_coordinates(rows, cols):
            try:
                pattern = SparsePattern._from_slot_coordinates(
                    rows, cols, shape=self._pattern.shape, block_size=self.block_size
                )
                self._check_capacity(pattern)
                pattern = find_equal_pattern(pattern)
            except (TypeError, ValueError) as error:
                line = f"the pattern of {prefix or 'the layer'!r} does not fit: {error}"
                if isinstance(rows, Tensor) and rows.is_floating_point():
                    line += (
                        "; if the state is an average of two states, rows and cols must not be "
                        "averaged: call dynsparse.nn.follow_patterns(copy, model) and average the "
                        "parameters"
                    )
                error_msgs.append(line)
                return
            values = state_dict.get(prefix + "values")
            with torch.no_grad():
                if values is None or is_sharded(self.values) or is_sharded(values):
                    self._install(pattern)
                elif values.shape == pattern.values_shape:
                    # New memory, so that other threads see pattern and values of one moment.
                    self._install(pattern, values.to(self.values, copy=True))
        elif not complete and prefix + "values" in state_dict:
            error_msgs.append(
                f"the state has {prefix}values without {prefix}rows and {prefix}cols, so they may "
                "belong to another pattern: save and load the three together"
            )
            return
        elif not complete and prefix + "weight" in state_dict:
            error_msgs.append(
                f"{prefix}weight is that of a dense layer, but this layer is sparse: load it into "
                "the model before dynsparse.sparsify, or into dynsparse.densify(model)"
            )
        if prefix + "values" in state_dict:
            self._was_replaced = True
        self._permit_swap()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        weight = state_dict.get(prefix + "weight")
        marked = weight is not None and not weight.numel()  # by save_pretrained of transformers
        for name in ("rows", "cols", "weight") if marked else ("rows", "cols"):
            if prefix + name in unexpected_keys:
                unexpected_keys.remove(prefix + name)
            if strict and prefix + name not in state_dict:
                missing_keys.append(prefix + name)
        if self._values_as_copied is not None:
            self._replace_snapshot(Snapshot(self.values))

    def _has_coordinates(self, rows: Any, cols: Any) -> bool:
        """Whether these are the coordinates of the layer's slots."""
        if self.is_on_device:
            return False
        pattern = self._pattern
        for tensor in (rows, cols):
            if not (isinstance(tensor, Tensor) and tensor.is_cpu and tensor.dtype is torch.int32):
                return False
        # Columns first, as rows have to be computed; by numpy, whose calls are shorter.
        if not torch.equal(cols, pattern.cols):
            return False
        if not pattern._is_row_major:
            return torch.equal(rows, pattern.rows)
        counts = np.diff(pattern.row_ptr.numpy())
        return np.array_equal(rows.numpy(), np.arange(len(counts)).repeat(counts))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with update_lock:
            if type(self.values) is nn.Parameter:
                check_owner(self)
            super()._save_to_state_dict(destination, prefix, keep_vars)
            pattern = self._pattern
        if self._omits_pattern:
            return
        find_equal_pattern(pattern)  # a copy may load it
        for name in ("rows", "cols"):  # copies, which may be written to
            destination[prefix + name] = getattr(pattern, name).to(self.values.device, copy=True)


def make_next_indexes(
    layers: Sequence[SparseModule], stacked: PatternIndex
) -> list[LayerIndex] | None:
    """Make the indexes of the next patterns of layers on a device, whose memory they overwrite.

    Returns None if they do not fit that memory.

    Args:
        layers: of equal shape, block size and number of blocks.
        stacked: the index tensors of the next patterns, [layers, ...].
    """
    before = [layer._state.index for layer in layers if layer._state is not None]
    if len(before) < len(layers) or not all(index.fits(stacked) for index in before):
        return None
    return LayerIndex.make_next(before, stacked)


def _find_alive(references: tuple[weakref.ref[SparseModule], ...]) -> list[SparseModule]:
    return [module for reference in references if (module := reference()) is not None]
