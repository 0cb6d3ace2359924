"""Compiling a graph and its programs for a target, and running them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dynsparse.machine.checks import check_mapping
from dynsparse.machine.dtypes import DType
from dynsparse.machine.errors import MachineError, ProgramError
from dynsparse.machine.exchange import CopyPlan
from dynsparse.machine.graph import Graph
from dynsparse.machine.host import Host
from dynsparse.machine.liveness import analyse
from dynsparse.machine.lowering import Lowering, Node
from dynsparse.machine.memory import check_memory as _check_memory
from dynsparse.machine.memory import measure_memory
from dynsparse.machine.profile import Profile, StepProfile
from dynsparse.machine.program import Program, check_nesting
from dynsparse.machine.target import Target
from dynsparse.machine.tensor import Tensor

__all__ = ["Engine"]


class Engine:
    """A program checked, planned and ready to run.

    Args:
        graph: the variables and vertices.
        program: a program, or several by name.
        target: the machine; the graph's own by default.
        check_memory: whether a tile that overflows is an error. Otherwise it only shows in the
            profile.
        max_iterations: after this many turns a while loop is taken for endless.
        numerics: whether half and float data is computed. Without it only whole numbers and bools,
            which steer a program, move and change; the profile is the same at a fraction of the
            time and memory, and floating-point tensors can be neither read nor written.

    Raises:
        MappingError: an element without a tile, or on a tile the target does not have.
        LocalityError: a vertex connected to another tile's memory.
        RaceError: vertices of a compute set, or sides of a copy, that meet in one element.
        OutOfMemoryError: a tile that does not fit, with its largest variables.
        ProgramError: a program that contains itself or writes a constant; or, without numerics, a
            codelet that makes whole numbers of floating-point ones.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program | Mapping[str, Program],
        target: Target | None = None,
        *,
        check_memory: bool = True,
        max_iterations: int = 1_000_000,
        numerics: bool = True,
    ) -> None:
        self.graph = graph
        self.target = graph.target if target is None else target
        if not isinstance(self.target, Target):
            raise TypeError(f"Engine takes a Target, got {type(target).__name__}")
        if max_iterations < 1:
            raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
        self.max_iterations = max_iterations
        self.numerics = numerics
        self.host = Host()
        self.steps: list[tuple[str, str, CopyPlan | None]] = []
        named = dict(program) if isinstance(program, Mapping) else {"": program}
        for one in named.values():
            if not isinstance(one, Program):
                raise TypeError(f"expected a Program, got {type(one).__name__}")
            check_nesting(one)
        check_mapping(graph, self.target)
        liveness = analyse(graph, named.values())
        if check_memory:
            # The variables alone, before the simulation takes memory for them.
            _check_memory(measure_memory(graph, self.target, [], [], liveness))
        # Memory of types that are not computed is address space only: never touched, so never real.
        self.memory: dict[DType, np.ndarray] = {
            dtype: np.full(size, dtype.poison, dtype.numpy)
            if self.computes(dtype)
            else np.empty(size, dtype.numpy)
            for dtype, size in graph.sizes.items()
        }
        for tensor, values in graph.initial:
            if self.computes(tensor.dtype):
                self._store(tensor, values, "the initial value")
        lowering = Lowering(self)
        self._nodes: dict[str, Node] = {
            name: lowering.lower(one, name) for name, one in named.items()
        }
        self.memory_use = measure_memory(
            graph, self.target, lowering.vertex_sets, lowering.copies, liveness
        )
        sets = lowering.vertex_sets
        self.counts = {
            "tiles used": int((self.memory_use.all_variables > 0).sum()),
            "variables": sum(len(group) for group in graph.variables.values()),
            "compute steps": lowering.compute_sets,
            "vertices": sum(v.count for v in sets),
            "edges": sum(v.count * len(v.edges) for v in sets),
            "exchanges": len(lowering.copies),
        }
        if check_memory:
            _check_memory(self.memory_use)

    def computes(self, dtype: DType) -> bool:
        """Whether data of this type is computed: see `numerics`."""
        return self.numerics or not dtype.is_floating

    def add_step(self, name: str, kind: str, plan: CopyPlan | None = None) -> int:
        """A row of the profile. For lowering."""
        self.steps.append((name, kind, plan))
        return len(self.steps) - 1

    def run(self, program: str | None = None) -> Profile:
        """Run a program (named, if there are several) and return what it cost.

        Variables keep their values from run to run.
        """
        if program is None and len(self._nodes) > 1:
            raise ProgramError(f"say which program to run: {', '.join(self._nodes)}")
        name = next(iter(self._nodes)) if program is None else program
        if name not in self._nodes:
            raise ProgramError(f"no program {name!r}; there are: {', '.join(self._nodes)}")
        profile = Profile(
            self.target,
            self.memory_use,
            [StepProfile(n, kind) for n, kind, _ in self.steps],
            counts=dict(self.counts),
        )
        # The machine overflows to infinity without a word.
        with np.errstate(all="ignore"):
            self._nodes[name](profile)
        for row, (_, _, plan) in zip(profile.steps, self.steps, strict=True):
            if plan is not None and row.runs:
                row.tile_exchange = plan.exchange_per_tile * row.runs
                row.received_bytes = plan.received_bytes * row.runs
                row.sent_bytes = plan.sent_bytes * row.runs
                row.local_bytes = plan.local_bytes * row.runs
        return profile

    # The host's side.

    def _tensor(self, what: str | Tensor) -> Tensor:
        tensor = self._find(what)
        if not self.computes(tensor.dtype):
            raise ProgramError(
                f"{tensor.name} is {tensor.dtype.name}, which an engine with numerics=False does "
                f"not compute"
            )
        return tensor

    def _find(self, what: str | Tensor) -> Tensor:
        if isinstance(what, Tensor):
            if what.graph is not self.graph:
                raise MachineError("the tensor belongs to another graph")
            return what
        if what in self.graph.handles:
            return self.graph.handles[what]
        found = [v for group in self.graph.variables.values() for v in group if v.name == what]
        if len(found) != 1:
            raise KeyError(
                f"{'several variables' if found else 'no handle or variable'} named {what!r}"
            )
        return found[0].tensor

    def read(self, what: str | Tensor) -> np.ndarray:
        """A copy of a tensor's values, by handle name, variable name or tensor."""
        tensor = self._tensor(what)
        data = tensor.data(self.memory)
        if data is None:
            return self.memory[tensor.dtype][tensor.addresses()]
        return data.copy()

    def write(self, what: str | Tensor, values: Any) -> None:
        """Set a tensor's values. They round to its element type; a scalar fills it.

        Raises:
            ValueError: another shape, or integers that do not fit the type.
            TypeError: fractional values for an integer type.
            ProgramError: a constant.
        """
        tensor = self._tensor(what)
        constant = self.graph.constant_in(tensor)
        if constant is not None:
            raise ProgramError(f"{constant.name!r} is a constant and cannot be written")
        self._store(tensor, values, f"write to {what if isinstance(what, str) else tensor.name}")

    def connect(self, stream: str, end: Any) -> None:
        """Connect a stream of the graph to the host: see `Host.connect`."""
        if stream not in self.graph.streams:
            raise KeyError(f"no stream named {stream!r}")
        self.host.connect(self.graph.streams[stream], end)

    def _store(self, tensor: Tensor, values: Any, what: str) -> None:
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        array = np.asarray(values)
        if array.shape not in ((), tensor.shape):
            raise ValueError(f"{what}: expected {list(tensor.shape)}, got {list(array.shape)}")
        kind = tensor.dtype.numpy.kind
        if kind in "iu":
            if array.dtype.kind not in "iub":
                raise TypeError(f"{what}: expected integers, got {array.dtype}")
            limits = np.iinfo(tensor.dtype.numpy)
            if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
                raise ValueError(
                    f"{what}: {tensor.dtype.name} holds {limits.min} to {limits.max}, got "
                    f"{array.min()} to {array.max()}"
                )
        with np.errstate(over="ignore"):
            data = tensor.data(self.memory)
            if data is not None:
                data[...] = array
            else:
                self.memory[tensor.dtype][tensor.addresses()] = array
