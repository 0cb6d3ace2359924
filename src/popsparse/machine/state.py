"""The contents of variables while a program runs, on the tiles and on the host."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import numpy as np

from dynsparse._core.checks import check_array, check_integer, check_kind, shorten
from popsparse.machine.dtypes import DType, MachineError, ProgramError, convert_values
from popsparse.machine.exchange import CopyPlan
from popsparse.machine.graph import Graph, RemoteBuffer, Stream
from popsparse.machine.profile import Profile
from popsparse.machine.program import Program
from popsparse.machine.tensor import Tensor


class Host:
    """Feeds streams to the machine and receives those from it."""

    def __init__(self) -> None:
        self._ends: dict[Stream, Callable[..., Any]] = {}

    def connect(self, stream: Stream, end: Any) -> None:
        """Connect a stream.

        To the machine: an array [numel] or [k, numel], read row by row in a cycle, or a function
        without arguments that returns [numel]. From the machine: a function that takes [numel],
        or an array [numel] or [k, numel], filled row by row in a cycle.
        """
        if callable(end):
            self._ends[stream] = end
            return
        array = check_array(f"the end of stream {stream.name!r}", end, "fiub", "numbers")
        if not stream.to_device and array is not end:
            raise TypeError(f"stream {stream.name!r} writes into a NumPy array or a function")
        rows = array[None] if array.ndim == 1 else array
        if rows.ndim != 2 or rows.shape[1] != stream.numel or not len(rows):
            raise ValueError(
                f"stream {stream.name!r} needs [{stream.numel}] or [k, {stream.numel}], got "
                f"{list(array.shape)}"
            )
        turn = itertools.cycle(range(len(rows)))

        def fill(values: np.ndarray) -> None:
            rows[next(turn)] = values

        self._ends[stream] = (lambda: rows[next(turn)]) if stream.to_device else fill

    def _connected_end(self, stream: Stream) -> Callable[..., Any]:
        if stream not in self._ends:
            raise ProgramError(f"stream {stream.name!r} is not connected: call engine.connect")
        return self._ends[stream]

    def fetch(self, stream: Stream) -> np.ndarray:
        """The next values for the machine, [numel]."""
        values = np.asarray(self._connected_end(stream)())
        if values.shape != (stream.numel,):
            raise ValueError(
                f"stream {stream.name!r} needs [{stream.numel}], got {list(values.shape)}"
            )
        return values

    def deliver(self, stream: Stream, values: np.ndarray) -> None:
        """Hand values from the machine to the host."""
        self._connected_end(stream)(values.reshape(-1))


# A node runs one step (and those inside it) and adds its cost to the profile.
Node = Callable[[Profile], None]


class State:
    """The memory of a graph's variables, and other state of the steps.

    `memories` has one for each replica. `steps` has a row (name, kind, plan of the copy) for each
    step of the profile, `rows` the row of each program that has one. Arguments as for `Engine`.
    """

    def __init__(self, graph: Graph, *, numerics: bool, max_iterations: int) -> None:
        self.graph = graph
        self.target = graph.target
        self.numerics = numerics
        self.max_iterations = max_iterations
        self.host = Host()
        self.print_to: TextIO = sys.stderr
        self.float_exceptions = False
        self.rounding: np.random.Generator | None = None  # None rounds to nearest
        # The processor of each remote buffer: that of the tiles in its first copy.
        self.remote_home: dict[RemoteBuffer, list[int]] = {}
        self.steps: list[tuple[str, str, CopyPlan | None]] = []
        self.rows: dict[Program, int] = {}
        # The memory of types that are not computed is never accessed, so it takes no real memory.
        self.memories: list[dict[DType, np.ndarray]] = [
            {
                dtype: np.full(size, dtype.poison, dtype.numpy)
                if self.computes(dtype)
                else np.empty(size, dtype.numpy)
                for dtype, size in graph.sizes.items()
            }
            for _ in range(graph.replicas)
        ]
        self.remote = {
            buffer: np.zeros((graph.replicas, buffer.rows, buffer.numel), buffer.dtype.numpy)
            for buffer in graph.remote_buffers.values()
        }
        for tensor, values in graph.initial:
            if self.computes(tensor.dtype):
                self.store(tensor, values, "the initial value")

    @contextmanager
    def float_errors(self, path: str, codelet: str) -> Iterator[None]:
        """Raises ProgramError for floating-point errors, if such exceptions are enabled."""
        if not self.float_exceptions:
            yield
            return
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                yield
        except FloatingPointError as error:
            raise ProgramError(f"{path}: {codelet!r}: {error}") from None

    @property
    def sync_of_all(self) -> float:
        """Cost of a synchronisation of all replicas and their processors."""
        several = len(self.memories) > 1 or self.target.processors > 1
        return self.target.link_sync_cycles if several else self.target.sync_cycles

    def computes(self, dtype: DType) -> bool:
        """Whether data of this type is computed: see `numerics` of `Engine`."""
        return self.numerics or not dtype.is_floating

    def add_step(self, program: Program, name: str, kind: str, plan: CopyPlan | None = None) -> int:
        """Add the row of a program to the profile."""
        row = self.rows[program] = len(self.steps)
        self.steps.append((name, kind, plan))
        return row

    def _find_computed(self, what: str | Tensor) -> Tensor:
        tensor = self._find(what)
        if not self.computes(tensor.dtype):
            raise ProgramError(
                f"{tensor.name} is {tensor.dtype.name}, which an engine with numerics=False does "
                f"not compute"
            )
        return tensor

    def _find(self, what: str | Tensor) -> Tensor:
        if isinstance(what, Tensor):
            if what.graph is not self.graph.root:
                raise MachineError("the tensor belongs to another graph")
            return what
        check_kind("what is read or written", what, str, "a Tensor or a name")
        if what in self.graph.handles:
            return self.graph.handles[what]
        matching = [v for group in self.graph.variables.values() for v in group if v.name == what]
        if len(matching) != 1:
            several = "several variables" if matching else "no handle or variable"
            raise KeyError(f"{several} named {shorten(what)}")
        return matching[0].tensor

    def read(self, what: str | Tensor, replica: int = 0) -> np.ndarray:
        """Read a tensor's values: see `Engine.read`."""
        return self._find_computed(what).values(self.memories[self.check_replica(replica)])

    def check_replica(self, replica: Any) -> int:
        """Check and return the number of a replica."""
        number = check_integer("replica", replica, 0)
        if number >= len(self.memories):
            raise ValueError(f"replica must be below {len(self.memories)}, got {number}")
        return number

    def write(self, what: str | Tensor, values: Any, replica: int | None = None) -> None:
        """Set a tensor's values: see `Engine.write`."""
        tensor = self._find_computed(what)
        constant = self.graph.constant_in(tensor)
        if constant is not None:
            raise ProgramError(f"{constant.name!r} is a constant and cannot be written")
        name = what if isinstance(what, str) else tensor.name
        self.store(tensor, values, f"write to {name}", replica)

    def store(self, tensor: Tensor, values: Any, what: str, replica: int | None = None) -> None:
        """Set a tensor's values; raises as `write`, with messages that begin with `what`."""
        chosen = self.memories if replica is None else [self.memories[self.check_replica(replica)]]
        array = convert_values(what, values, tensor.dtype)
        if array.shape not in ((), tensor.shape):
            raise ValueError(f"{what}: expected {list(tensor.shape)}, got {list(array.shape)}")
        for memory in chosen:
            tensor.fill(memory, array)
