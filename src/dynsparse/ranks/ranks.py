"""Collectives: a process group with the few operations that pattern updates need.

All code that decides something over ranks takes a `Ranks`, so that it runs unchanged in one process
and over a process group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dynsparse._core.checks import shorten


class Ranks:
    """This rank in a group. The base class is a group of one, whose collectives do nothing.

    Every rank calls the same collectives in the same order. Results are the same bits on all ranks.
    Tensors may be on any device; one that the backend cannot send is copied to `device` first.

    Attributes:
        rank: the rank of this process in the group, from 0.
        size: number of ranks.
        device: the device to make small tensors for collectives on.
        sent: bytes that this rank has sent, counted as in a ring.
        calls: number of collectives.
        timeout: seconds that ranks wait for each other before an update, with gloo.
    """

    timeout = 120.0

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device("cpu") if device is None else device
        self.sent = 0
        self.calls = 0
        self._mesh: Ranks | None = None
        self._coordinates: dict[str, int] = {}

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.size == 1 and self._mesh is None

    @property
    def all_ranks(self) -> Ranks:
        """The ranks that share errors: those of the mesh that this is a group of, or these."""
        return self._mesh or self

    @property
    def coordinates(self) -> tuple[int, int, int]:
        """The coordinates of this rank in a mesh, along x, y and z; (0, 0, rank) without a mesh."""
        return self._coordinates.get("x", 0), self._coordinates.get("y", 0), self.rank

    def as_mesh_group(self, mesh: Ranks, coordinates: dict[str, int]) -> Ranks:
        """Return these ranks as one group of a mesh, at these coordinates along its other axes."""
        if mesh.alone:
            return self
        group = object.__new__(type(self))
        group.__dict__.update(self.__dict__, _mesh=mesh, _coordinates=coordinates)
        return group

    def is_lead_group(self, axes: Collection[str] = ()) -> bool:
        """Whether this is the first group along all axes of the mesh but these.

        Of a layer that is sharded over `axes` all groups along the other axes hold the same.
        """
        return not any(rank for axis, rank in self._coordinates.items() if axis not in axes)

    def is_lead_rank(self, axes: Collection[str] = ()) -> bool:
        """Whether this is the first rank of a lead group."""
        return self.rank == 0 and self.is_lead_group(axes)

    def barrier(self, what: str, timeout: float) -> None:
        """Wait for all ranks, with a shorter timeout than the collectives that follow.

        If the first rank is missing, the timeout of the group applies.

        Args:
            what: for the error: what this rank does, and what the user should do.
            timeout: in seconds.

        Raises:
            RuntimeError: a rank did not arrive in time.
        """

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place."""
        if not self.alone:
            self._count_call(2 * tensor.nbytes * (self.size - 1) // self.size)
            self._reduce(tensor, "sum")
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum over ranks, in place."""
        if not self.alone:
            self._count_call(2 * tensor.nbytes * (self.size - 1) // self.size)
            self._reduce(tensor, "max")
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Send the tensor of the first rank to all others, in place."""
        if not self.alone:
            self._count_call(tensor.nbytes if self.rank == 0 else 0)
            self._broadcast(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of ranks.

        Args:
            tensor: [any, ...]; the first dimension may differ between ranks.
            sizes: the first dimension of each rank's tensor, if all ranks know them; it saves a
                collective.
        """
        if self.alone:
            return [tensor]
        if sizes is None:
            size = torch.tensor([len(tensor)], device=self.device)
            sizes = torch.cat(self.all_gather(size, [1] * self.size)).tolist()
        most = max(sizes)
        padded = tensor
        if len(tensor) < most:
            padded = tensor.new_zeros(most, *tensor.shape[1:])
            padded[: len(tensor)] = tensor
        self._count_call(padded.nbytes * (self.size - 1))
        out = tensor.new_empty(self.size, *padded.shape)
        if padded.numel():
            self._gather(out, padded)
        return [part[:size] for part, size in zip(out, sizes, strict=True)]

    def all_to_all(
        self,
        tensor: Tensor,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Send a slice of `tensor` to every rank; return the slices that this rank receives.

        Args:
            tensor: [sum of input_sizes, ...].
            input_sizes: leading entries to send to each rank; defaults to equal shares.
            output_sizes: entries to receive from each rank; defaults to equal shares.

        Returns:
            The slices, concatenated in the order of ranks.
        """
        if self.alone:
            return tensor
        share = [len(tensor) // self.size] * self.size
        input_sizes = share if input_sizes is None else list(input_sizes)
        output_sizes = share if output_sizes is None else list(output_sizes)
        row = tensor[:1].nbytes if len(tensor) else 0
        self._count_call(row * (sum(input_sizes) - input_sizes[self.rank]))
        out = tensor.new_empty(sum(output_sizes), *tensor.shape[1:])
        self._exchange(out, tensor.contiguous(), output_sizes, input_sizes)
        return out

    def _count_call(self, sent: int) -> None:
        self.sent += sent
        self.calls += 1

    # For a group of one; subclasses override these.

    def _reduce(self, tensor: Tensor, how: str) -> None:
        pass

    def _broadcast(self, tensor: Tensor) -> None:
        pass

    def _gather(self, out: Tensor, tensor: Tensor) -> None:
        out.copy_(tensor.expand_as(out))

    def _exchange(
        self, out: Tensor, tensor: Tensor, output_sizes: list[int], input_sizes: list[int]
    ) -> None:
        out.copy_(tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # process groups are shared


ALONE = Ranks()
"""A group of one rank."""


class GroupRanks(Ranks):
    """The ranks of a process group of torch.distributed.

    With gloo `ranks_of` gives these collectives a group of their own, so that they cannot be mixed
    up with others that run meanwhile, such as those of data parallel training. With other backends
    they use the group itself.

    Raises, in every collective:
        RuntimeError: another rank has ended, or did not arrive within the timeout of the group.
    """

    def __init__(self, group: Any) -> None:
        dist = torch.distributed
        self.group = group
        kinds = {kind.type for kind in group._device_types}
        if "cpu" in kinds or not kinds:
            device = torch.device("cpu")
        else:
            kind = sorted(kinds)[0]
            device = torch.device(kind, torch.get_device_module(kind).current_device())
        self._kinds = kinds or {"cpu"}
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)

    def _to_supported_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on a device that the backend supports; itself if it is on one."""
        at = tensor if tensor.device.type in self._kinds else tensor.to(self.device)
        return at.contiguous()

    @contextmanager
    def _output_buffer(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensor, or a copy that the backend supports, for a collective to write to.

        torch's errors about lost ranks become one line.
        """
        at = self._to_supported_device(tensor)
        try:
            yield at
        except RuntimeError as error:
            raise RuntimeError(
                "the other ranks cannot be reached: one of them has ended, or did not come in "
                f"time: {_first_line(error)}"
            ) from error
        if at is not tensor:
            tensor.copy_(at)

    def barrier(self, what: str, timeout: float) -> None:
        if torch.distributed.get_backend(self.group) != "gloo":
            return
        try:
            torch.distributed.monitored_barrier(
                self.group, timeout=timedelta(seconds=timeout), wait_all_ranks=True
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"not all ranks came in time: {what}; torch says: {_first_line(error)}"
            ) from error

    def _reduce(self, tensor: Tensor, how: str) -> None:
        op = torch.distributed.ReduceOp
        with self._output_buffer(tensor) as at:
            torch.distributed.all_reduce(at, op.SUM if how == "sum" else op.MAX, group=self.group)

    def _broadcast(self, tensor: Tensor) -> None:
        with self._output_buffer(tensor) as at:
            torch.distributed.broadcast(at, group=self.group, group_src=0)

    def _gather(self, out: Tensor, tensor: Tensor) -> None:
        sent = self._to_supported_device(tensor)
        with self._output_buffer(out) as at:
            _find_all_gather()(at.view(-1), sent.view(-1), group=self.group)

    def _exchange(
        self, out: Tensor, tensor: Tensor, output_sizes: list[int], input_sizes: list[int]
    ) -> None:
        sent = self._to_supported_device(tensor)
        with self._output_buffer(out) as at:
            torch.distributed.all_to_all_single(
                at, sent, output_sizes, input_sizes, group=self.group
            )

    def __reduce__(self) -> Any:
        raise TypeError("process groups cannot be pickled: save trainer.state_dict() instead")


def _first_line(error: BaseException) -> str:
    """Return the first line of an error of torch."""
    return str(error).partition("\n")[0][:300]


def _find_all_gather() -> Any:
    """Return torch's function by its new name, or by the old one in an older torch."""
    dist = torch.distributed
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_group_ranks: WeakKeyDictionary[Any, GroupRanks] = WeakKeyDictionary()
"""For each gloo group the ranks with a second group, which is made once. Weak, so that
`destroy_process_group` ends both, and their threads."""


def ranks_of(choice: Any) -> Ranks:
    """Return the `Ranks` for the argument `ranks` of a trainer.

    Args:
        choice: "auto": all ranks of torch.distributed if it is initialised, otherwise this process
            alone; None: this process alone; a process group, or a device mesh of one dimension.

    Raises:
        TypeError: anything else.
        ValueError: a mesh of several dimensions, a group without this rank.
    """
    if isinstance(choice, Ranks):
        return choice
    if choice is None:
        return ALONE
    dist = torch.distributed
    ready = dist.is_available() and dist.is_initialized()
    if isinstance(choice, str) and choice == "auto":
        return _make_ranks(dist.group.WORLD) if ready else ALONE
    if ready:
        from torch.distributed.device_mesh import DeviceMesh  # slow to import

        if isinstance(choice, DeviceMesh):
            if choice.ndim != 1:
                raise ValueError(
                    f"ranks must be a mesh of one dimension, got {choice.ndim}: pass the part of "
                    'it over which the model is replicated, such as mesh["replicate"]'
                )
            return _make_ranks(choice.get_group())
        if isinstance(choice, dist.ProcessGroup):
            return _make_ranks(choice)
    raise TypeError(
        'ranks must be "auto", None, a process group or a device mesh of torch.distributed, got '
        f"{shorten(choice)}"
    )


def _make_ranks(group: Any) -> Ranks:
    dist = torch.distributed
    if dist.get_rank(group) < 0:
        raise ValueError("ranks must be a group that this rank belongs to")
    if dist.get_world_size(group) == 1:
        return ALONE
    if dist.get_backend(group) != "gloo":
        return GroupRanks(group)
    known = _group_ranks.get(group)
    if known is None:
        second = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=_timeout_of(group),
            use_local_synchronization=group is not dist.group.WORLD,
        )
        known = _group_ranks[group] = GroupRanks(second)
    return known


def _timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a group's collectives; None, torch's default, if it cannot be read."""
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout
