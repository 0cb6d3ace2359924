"""Programs: steps and control flow. Names follow Poplar."""

from __future__ import annotations

from collections import abc
from typing import Any

from dynsparse._core.checks import check_integer, check_kind
from popsparse.machine.dtypes import ProgramError
from popsparse.machine.graph import ComputeSet, RemoteBuffer, Stream
from popsparse.machine.tensor import Tensor


class Program:
    """A step of a program. `name`, if given, appears in the profile's paths."""

    name: str | None = None

    def parts(self) -> list[Program]:
        """The programs that this one contains."""
        return []


def check_program(program: Any) -> Program:
    """Raises TypeError for anything but a program."""
    checked: Program = check_kind("a part of a program", program, Program, "a Program")
    return checked


class Sequence(Program):
    """Programs in order."""

    def __init__(self, *programs: Program, name: str | None = None) -> None:
        self.programs = [check_program(p) for p in programs]
        self.name = name

    def add(self, *programs: Program) -> Sequence:
        """Append programs; returns the sequence."""
        self.programs.extend(check_program(p) for p in programs)
        return self

    def parts(self) -> list[Program]:
        return self.programs


class Execute(Program):
    """Run the vertices of a compute set. The step's name defaults to that of the compute set."""

    def __init__(self, compute_set: ComputeSet, *, name: str | None = None) -> None:
        self.compute_set = check_kind("compute_set", compute_set, ComputeSet, "a ComputeSet")
        self.name = compute_set.name if name is None else name


class Copy(Program):
    """Move data over the exchange, all at once: `Copy(source, destination)`, or several pairs,
    `Copy([(source, destination), ...])`. One side of a single pair may be a `Stream`, or a
    `RemoteBuffer`, of which one row moves: that of `index`, a single integer on a tile.

    Sources and destinations match in type and number of elements; elements are copied in order. No
    destination may overlap a source or another destination.
    """

    def __init__(
        self,
        source: Any,
        destination: Any = None,
        *,
        index: Tensor | None = None,
        name: str | None = None,
    ) -> None:
        if destination is None and isinstance(source, (Tensor, Stream, RemoteBuffer)):
            raise TypeError("Copy takes a source and a destination, or a list of such pairs")
        pairs = [(source, destination)] if destination is not None else list(source)
        self.name = name
        self.stream: Stream | None = None
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for src, dst in pairs:
            sides = (src, dst)
            if not all(isinstance(s, (Tensor, Stream, RemoteBuffer)) for s in sides):
                raise TypeError(
                    f"Copy takes tensors, streams or remote buffers, got {src!r} and {dst!r}"
                )
            if src.dtype != dst.dtype:
                raise TypeError(
                    f"Copy from {src.dtype.name} ({src.name}) to {dst.dtype.name} ({dst.name}): "
                    f"cast first"
                )
            if src.numel != dst.numel:
                raise ValueError(
                    f"Copy of {src.numel} elements ({src.name}) to {dst.numel} ({dst.name})"
                )
            self.pairs.append((src, dst))
        self.remote: RemoteBuffer | None = None
        self.index = index
        outside = [s for pair in self.pairs for s in pair if not isinstance(s, Tensor)]
        if outside and (len(self.pairs) != 1 or len(outside) != 1):
            raise ProgramError(
                "a stream or a remote buffer is copied to or from one tensor, in its own Copy"
            )
        if outside and isinstance(outside[0], RemoteBuffer):
            self.remote = outside[0]
            if index is not None:
                _check_scalar(index, "the index of a remote buffer")
            elif self.remote.rows > 1:
                raise ProgramError(
                    f"remote buffer {self.remote.name!r} has {self.remote.rows} rows: say which "
                    "with index="
                )
        elif index is not None:
            raise ProgramError("index= is for remote buffers: leave it out")
        elif outside:
            stream = outside[0]
            assert isinstance(stream, Stream)
            self.stream = stream
            if stream.to_device != (self.pairs[0][0] is stream):
                way = "to the machine" if stream.to_device else "from the machine"
                raise ProgramError(f"stream {stream.name!r} goes {way}")


class CrossReplicaCopy(Program):
    """Copy each replica's tensor to another replica: `to` = {0: 1, 1: 0} copies from replica 0 to 1
    and from 1 to 0. Replicas that are not receivers keep their values.
    """

    def __init__(
        self,
        source: Tensor,
        destination: Tensor,
        to: abc.Mapping[int, int],
        *,
        name: str | None = None,
    ) -> None:
        for side in (source, destination):
            check_kind("what CrossReplicaCopy moves", side, Tensor, "a Tensor of a graph")
        if source.dtype != destination.dtype or source.numel != destination.numel:
            raise ProgramError(
                f"CrossReplicaCopy of {source.dtype.name} {list(source.shape)} ({source.name}) to "
                f"{destination.dtype.name} {list(destination.shape)} ({destination.name})"
            )
        check_kind("to", to, abc.Mapping, "receivers by sender, such as {0: 1, 1: 0}")
        self.to = {
            check_integer("a sender", s, 0): check_integer("a receiver", r, 0)
            for s, r in to.items()
        }
        if len(set(self.to.values())) != len(self.to):
            raise ProgramError(f"a replica receives from one other, got {self.to}")
        self.pairs = [(source, destination)]
        self.name = name


class PrintTensor(Program):
    """Print the values of a tensor to the engine's `print_to`, after a title."""

    def __init__(self, tensor: Tensor, title: str = "", *, name: str | None = None) -> None:
        self.tensor = check_kind("tensor", tensor, Tensor, "a Tensor of a graph")
        self.title = check_kind("title", title, str, "a text") or tensor.name
        self.name = name


class ErrorProgram(Program):
    """End the run with an `AbortError` with this message and the values of a tensor."""

    def __init__(
        self, message: str, tensor: Tensor | None = None, *, name: str | None = None
    ) -> None:
        self.message = check_kind("message", message, str, "a text")
        self.tensor = check_kind("tensor", tensor, (Tensor, type(None)), "a Tensor or None")
        self.name = name


class Abort(ErrorProgram):
    """End the run with an `AbortError`."""

    def __init__(self, message: str = "the program aborts", *, name: str | None = None) -> None:
        super().__init__(message, name=name)


class Repeat(Program):
    """Run the body a fixed number of times."""

    def __init__(self, count: int, body: Program, *, name: str | None = None) -> None:
        self.count = check_integer("the count of Repeat", count, 0)
        self.body = check_program(body)
        self.name = name

    def parts(self) -> list[Program]:
        return [self.body]


def _check_scalar(value: Any, what: str) -> Tensor:
    check_kind(what, value, Tensor, "a Tensor")
    if value.numel != 1 or value.dtype.is_floating:
        raise ProgramError(
            f"{what} must be one bool or integer, got {value.dtype.name} {list(value.shape)} "
            f"({value.name})"
        )
    return value


class _While(Program):
    runs_while = True

    def __init__(
        self, condition: Program, predicate: Tensor, body: Program, *, name: str | None = None
    ) -> None:
        self.condition = check_program(condition)
        self.predicate = _check_scalar(predicate, f"the predicate of {type(self).__name__}")
        self.body = check_program(body)
        self.name = name

    def parts(self) -> list[Program]:
        return [self.condition, self.body]


class RepeatWhileTrue(_While):
    """Run `condition`, test `predicate`, run `body` if it is true, and repeat."""


class RepeatWhileFalse(_While):
    """Run `condition`, test `predicate`, run `body` if it is false, and repeat."""

    runs_while = False


class If(Program):
    """Run one program if `predicate` is true, otherwise the other."""

    def __init__(
        self,
        predicate: Tensor,
        then: Program,
        otherwise: Program | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.predicate = _check_scalar(predicate, "the predicate of If")
        self.then = check_program(then)
        self.otherwise = check_program(otherwise) if otherwise is not None else Sequence()
        self.name = name

    def parts(self) -> list[Program]:
        return [self.then, self.otherwise]


class Switch(Program):
    """Run the program of the case that equals `value`, or the default (none: do nothing)."""

    def __init__(
        self,
        value: Tensor,
        cases: abc.Mapping[int, Program] | abc.Sequence[Program],
        default: Program | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.value = _check_scalar(value, "the value of Switch")
        check_kind("the cases of Switch", cases, (abc.Mapping, abc.Sequence), "programs by number")
        items = cases.items() if isinstance(cases, abc.Mapping) else enumerate(cases)
        self.cases = {check_integer("a case of Switch", k): check_program(p) for k, p in items}
        self.default = check_program(default) if default is not None else Sequence()
        self.name = name

    def parts(self) -> list[Program]:
        return [*self.cases.values(), self.default]


class AbortOnCondition(If):
    """End the run with an `AbortError` if a predicate is true."""

    def __init__(
        self,
        predicate: Tensor,
        message: str = "the condition of an abort is true",
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(predicate, Abort(message), name=name)


class Call(Program):
    """Run a program that other places call too. It is planned and stored once."""

    def __init__(self, function: Program, *, name: str | None = None) -> None:
        self.function = check_program(function)
        self.name = name

    def parts(self) -> list[Program]:
        return [self.function]


class Parallel(Program):
    """Programs of different processors that run at the same time, by processor.

    The results are those of running the branches in order, the cycles those of the longest branch:
    within a branch only the tiles of its processor synchronise. So a branch computes and copies
    only on its processor; transfers over links or the host link come before or after.
    """

    def __init__(self, branches: abc.Mapping[int, Program], *, name: str | None = None) -> None:
        check_kind("branches", branches, abc.Mapping, "programs by processor")
        self.branches = {
            check_integer("a processor", k, 0): check_program(p) for k, p in branches.items()
        }
        self.name = name

    def parts(self) -> list[Program]:
        return list(self.branches.values())


class Sync(Program):
    """Wait for all tiles."""

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name


class WriteUndef(Program):
    """Declare that the values of a tensor are no longer needed. Costs nothing; the memory of
    variables that it covers completely can be shared until the next write."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = check_kind("tensor", tensor, Tensor, "a Tensor")


def check_nesting(program: Program, outer_programs: tuple[Program, ...] = ()) -> None:
    """Raises ProgramError if a program contains itself."""
    if any(program is outer for outer in outer_programs):
        names = [p.name or type(p).__name__ for p in (*outer_programs, program)]
        raise ProgramError(f"a program contains itself: {' > '.join(names)}")
    for part in program.parts():
        check_nesting(part, (*outer_programs, program))
