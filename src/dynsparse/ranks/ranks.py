"""The ranks that decide together: a process group with the few moves that decisions need.

Whoever decides something over ranks asks a `Ranks` and nothing else, so that the same code runs in
one process and over a process group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dynsparse.files.shorten import shortened


class Ranks:
    """This rank among those that decide together. This base is a rank alone: its moves do nothing.

    Every rank makes the same moves in the same order. Results are the same bits on all ranks.
    Tensors may be on any device; what a backend cannot send goes by way of `device`.

    Attributes:
        rank: the number of this one, from 0.
        size: how many there are.
        device: where small tensors for the moves are best made.
        sent: bytes that this rank has sent, as a ring sends them.
        calls: moves made.
        timeout: seconds that `barrier` waits with gloo.
    """

    timeout = 120.0

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device("cpu") if device is None else device
        self.sent = 0
        self.calls = 0
        self._everyone: Ranks | None = None
        self._place: dict[str, int] = {}

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.size == 1 and self._everyone is None

    @property
    def all_ranks(self) -> Ranks:
        """Those who must hear of an error: these ranks, or the mesh they are a line of."""
        return self._everyone or self

    @property
    def place(self) -> tuple[int, int, int]:
        """Where in a mesh this rank is, along x, y and z; (0, 0, rank) where there is none."""
        return self._place.get("x", 0), self._place.get("y", 0), self.rank

    def within(self, everyone: Ranks, place: dict[str, int]) -> Ranks:
        """These ranks as a line of a mesh, at a place along its other axes."""
        if everyone.alone:
            return self
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, _everyone=everyone, _place=place)
        return made

    def is_lead_group(self, axes: Collection[str] = ()) -> bool:
        """Whether this line speaks for what is spread over some axes of the mesh: along the others
        all lines hold the same, and the first speaks."""
        return not any(rank for axis, rank in self._place.items() if axis not in axes)

    def is_lead_rank(self, axes: Collection[str] = ()) -> bool:
        """Whether this rank does, alone of its line."""
        return self.rank == 0 and self.is_lead_group(axes)

    def barrier(self, what: str, timeout: float | None = None) -> None:
        """Wait until all ranks are here, but not for long: before moves to which all should come.
        Where the first rank is the one that is missing, the time limit of the group holds.

        Args:
            what: for the error: what they are here for, and how it is mended.
            timeout: seconds, in place of the attribute.

        Raises:
            RuntimeError: some did not come.
        """

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if not self.alone:
            self._note(2 * tensor.nbytes * (self.size - 1) // self.size)
            self._reduce(tensor, "sum")
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The largest of all ranks, entry by entry, in place."""
        if not self.alone:
            self._note(2 * tensor.nbytes * (self.size - 1) // self.size)
            self._reduce(tensor, "max")
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """What the rank `source` holds, in place."""
        if not self.alone:
            self._note(tensor.nbytes if self.rank == source else 0)
            self._broadcast(tensor, source)
        return tensor

    def all_gather(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """What every rank holds, in the order of ranks.

        Args:
            tensor: [any, ...]; the first dimension may differ from rank to rank.
            sizes: of the first dimension, by rank, where all ranks know them; it spares a move.
        """
        if self.alone:
            return [tensor]
        if sizes is None:
            own = torch.tensor([len(tensor)], device=self.device)
            sizes = torch.cat(self.all_gather(own, [1] * self.size)).tolist()
        most = max(sizes)
        padded = tensor
        if len(tensor) < most:
            padded = tensor.new_zeros(most, *tensor.shape[1:])
            padded[: len(tensor)] = tensor
        self._note(padded.nbytes * (self.size - 1))
        out = tensor.new_empty(self.size, *padded.shape)
        if padded.numel():
            self._gather(out, padded)
        return [part[:size] for part, size in zip(out, sizes, strict=True)]

    def all_to_all(
        self,
        tensor: Tensor,
        sizes: Sequence[int] | None = None,
        coming: Sequence[int] | None = None,
    ) -> Tensor:
        """A piece of `tensor` to every rank, and the pieces of all ranks for this one, joined in
        their order.

        Args:
            tensor: [sum of sizes, ...].
            sizes: how many leading entries go to each rank; equal shares when left out.
            coming: how many come from each rank; equal shares when left out.
        """
        if self.alone:
            return tensor
        share = [len(tensor) // self.size] * self.size
        sizes = share if sizes is None else list(sizes)
        coming = share if coming is None else list(coming)
        row = tensor[:1].nbytes if len(tensor) else 0
        self._note(row * (sum(sizes) - sizes[self.rank]))
        out = tensor.new_empty(sum(coming), *tensor.shape[1:])
        self._exchange(out, tensor.contiguous(), coming, sizes)
        return out

    def _note(self, sent: int) -> None:
        self.sent += sent
        self.calls += 1

    # Of one rank; those of several are for the kinds of ranks.

    def _reduce(self, tensor: Tensor, how: str) -> None:
        pass

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def _gather(self, out: Tensor, tensor: Tensor) -> None:
        out.copy_(tensor.expand_as(out))

    def _exchange(
        self, out: Tensor, tensor: Tensor, coming: Sequence[int], sizes: Sequence[int]
    ) -> None:
        out.copy_(tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a copy of what decides over ranks decides over the same ones


ALONE = Ranks()
"""One rank, which has nobody to ask."""


class GroupRanks(Ranks):
    """The ranks of a process group of torch.distributed.

    With gloo the moves have a group of their own, so that a rank that makes other moves meanwhile,
    as data parallel training does, cannot mix them up with these. With other backends they go over
    the group itself.

    Raises, in every move:
        RuntimeError: another rank has ended, or did not come within the time limit of the group.
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

    def _at(self, tensor: Tensor) -> Tensor:
        """The tensor where the backend can send it from; itself, if it can."""
        at = tensor if tensor.device.type in self._kinds else tensor.to(self.device)
        return at.contiguous()

    def barrier(self, what: str, timeout: float | None = None) -> None:
        if torch.distributed.get_backend(self.group) != "gloo":
            return
        seconds = self.timeout if timeout is None else timeout
        try:
            torch.distributed.monitored_barrier(
                self.group, timeout=timedelta(seconds=seconds), wait_all_ranks=True
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"not all ranks came in time: {what}; torch says: {_first_line(error)}"
            ) from error

    def _reduce(self, tensor: Tensor, how: str) -> None:
        op = torch.distributed.ReduceOp
        at = self._at(tensor)
        with _told():
            torch.distributed.all_reduce(at, op.SUM if how == "sum" else op.MAX, group=self.group)
        if at is not tensor:
            tensor.copy_(at)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        at = self._at(tensor)
        with _told():
            torch.distributed.broadcast(at, group=self.group, group_src=source)
        if at is not tensor:
            tensor.copy_(at)

    def _gather(self, out: Tensor, tensor: Tensor) -> None:
        at, sent = self._at(out), self._at(tensor)
        with _told():
            _all_gather()(at.view(-1), sent.view(-1), group=self.group)
        if at is not out:
            out.copy_(at)

    def _exchange(
        self, out: Tensor, tensor: Tensor, coming: Sequence[int], sizes: Sequence[int]
    ) -> None:
        at, sent = self._at(out), self._at(tensor)
        dist, parts = torch.distributed, (list(coming), list(sizes))
        with _told():
            dist.all_to_all_single(at, sent, *parts, group=self.group)
        if at is not out:
            out.copy_(at)

    def __reduce__(self) -> Any:
        raise TypeError("process groups stay where they are: save trainer.state_dict() instead")


@contextmanager
def _told() -> Iterator[None]:
    """What torch says of a rank that is gone becomes one line."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "the other ranks cannot be reached: one of them has ended, or did not come in time: "
            f"{_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    """Of what torch says."""
    return str(error).partition("\n")[0][:300]


def _all_gather() -> Any:
    """By its newer name where torch has it, and warns of the old one."""
    dist = torch.distributed
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_made: WeakKeyDictionary[Any, GroupRanks] = WeakKeyDictionary()
"""By a group of gloo those with a group of their own beside it, which is made once. Weak, so that
`destroy_process_group` ends both, and their threads."""


def ranks_of(choice: Any) -> Ranks:
    """The ranks that `choice` means.

    Args:
        choice: "auto": all of torch.distributed's where it is initialised, otherwise this one
            alone; None: this one alone; a process group, or a device mesh of one dimension.

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
        return _of_group(dist.group.WORLD) if ready else ALONE
    if ready:
        from torch.distributed.device_mesh import DeviceMesh  # slow to load, and rarely asked for

        if isinstance(choice, DeviceMesh):
            if choice.ndim != 1:
                raise ValueError(
                    f"ranks must be a mesh of one dimension, got {choice.ndim}: pass the part of "
                    'it over which the model is replicated, such as mesh["replicate"]'
                )
            return _of_group(choice.get_group())
        if isinstance(choice, dist.ProcessGroup):
            return _of_group(choice)
    raise TypeError(
        'ranks must be "auto", None, a process group or a device mesh of torch.distributed, got '
        f"{shortened(choice)}"
    )


def _of_group(group: Any) -> Ranks:
    dist = torch.distributed
    if dist.get_rank(group) < 0:
        raise ValueError("ranks must be a group that this rank belongs to")
    if dist.get_world_size(group) == 1:
        return ALONE
    if dist.get_backend(group) != "gloo":
        return GroupRanks(group)
    known = _made.get(group)
    if known is None:
        own = dist.new_group(
            dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=_limit_of(group),
            use_local_synchronization=group is not dist.group.WORLD,
        )
        known = _made[group] = GroupRanks(own)
    return known


def _limit_of(group: Any) -> timedelta | None:
    """How long the moves of a group may take; None where it does not tell: torch's default."""
    try:
        limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return limit
