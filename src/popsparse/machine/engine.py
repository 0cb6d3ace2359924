"""The engine: compiles a program and runs it."""

from __future__ import annotations

import difflib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np

from dynsparse._core.checks import check_flag, check_integer, check_kind, shorten
from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse._core.files.limits import parse_json
from dynsparse.tracing import spanned
from popsparse.machine.checks import check_mapping
from popsparse.machine.dtypes import ProgramError
from popsparse.machine.graph import Graph
from popsparse.machine.lowering import Lowering
from popsparse.machine.memory import Contents, analyse, check_fit, measure_memory
from popsparse.machine.profile import Profile, StepProfile, build_document, build_tree
from popsparse.machine.program import Program, check_nesting, check_program
from popsparse.machine.state import Node, State
from popsparse.machine.tensor import Tensor

_T = TypeVar("_T")

ENVIRONMENT = ("DYNSPARSE_ENGINE_OPTIONS", "POPLAR_ENGINE_OPTIONS")
_reporting = itertools.count()


def _parse_flag(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return bool(value == "true")
    raise ValueError(f"option {name!r} must be 'true' or 'false', got {shorten(value)}")


def _parse_integer(value: Any, name: str) -> int:
    try:
        number = int(value, 0) if isinstance(value, str) else check_integer(name, value)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise ValueError(
            f"option {name!r} must be a whole number of 0 or more, got {shorten(value)}"
        )
    return number


def _parse_folder(value: Any, name: str) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"option {name!r} must be the path of a folder, got {shorten(value)}")
    return Path(value)


# The field of each option, and the function that reads its value.
_OPTIONS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "autoReport.all": ("", _parse_flag),
    "autoReport.directory": ("folder", _parse_folder),
    "autoReport.executionProfileProgramRunCount": ("reported_runs", _parse_integer),
    "autoReport.outputExecutionProfile": ("execution_report", _parse_flag),
    "autoReport.outputGraphProfile": ("graph_report", _parse_flag),
    "debug.allowOutOfMemory": ("allow_out_of_memory", _parse_flag),
    "debug.floatPointOpException": ("float_exceptions", _parse_flag),
    "target.workerStackSizeInBytes": ("worker_stack_bytes", _parse_integer),
}


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine. All others, including other options of Poplar, are errors.

    Attributes:
        allow_out_of_memory: `debug.allowOutOfMemory`: a program that does not fit is planned and
            its memory reported; only running it fails. (false)
        float_exceptions: `debug.floatPointOpException`: a vertex that divides by zero, overflows or
            makes NaN of numbers ends the run. (false: infinities and NaN propagate)
        worker_stack_bytes: `target.workerStackSizeInBytes`: bytes of each worker's stack, in the
            memory of every tile with vertices. (None: a typical total of all stacks, see
            `machine/target.py`)
        graph_report, execution_report: `autoReport.outputGraphProfile`: write `memory.json` when
            the engine is created; `autoReport.outputExecutionProfile`: write `profile.json` after
            runs. `autoReport.all` does both. (false)
        folder: `autoReport.directory`, created if it does not exist. (".")
        reported_runs: `autoReport.executionProfileProgramRunCount`: how many runs of each program
            `profile.json` holds, from the first on. (2)
    """

    allow_out_of_memory: bool = False
    float_exceptions: bool = False
    worker_stack_bytes: int | None = None
    graph_report: bool = False
    execution_report: bool = False
    folder: Path = Path()
    reported_runs: int = 2

    @classmethod
    def of_engine(cls, options: Any) -> EngineOptions:
        """The options given to an engine, which override those of the environment.

        Those of the environment apply to all engines of a process: each reports into its own
        folder, `engine-0` on, in order of creation.

        Raises:
            ValueError, TypeError: as `parse`; an environment variable that is not a JSON object of
                options.
        """
        parsed = cls.parse(options)
        for variable in ENVIRONMENT:
            text = os.environ.get(variable, "")
            if not text:
                continue
            try:
                shared = parse_json(text)
                if not isinstance(shared, dict):
                    raise ValueError(f"expected a JSON object, got {shorten(text)}")
                parsed = cls.parse({**shared, **(options or {})})
            except ValueError as error:
                raise ValueError(f"{variable}: {error}") from error
            reports = parsed.graph_report or parsed.execution_report
            if reports and "autoReport.directory" not in (options or {}):
                folder = parsed.folder / f"engine-{next(_reporting)}"
                parsed = replace(parsed, folder=folder)
            break
        return parsed

    @classmethod
    def parse(cls, options: Any) -> EngineOptions:
        """Parse a mapping of names to values, which may be text.

        Raises:
            ValueError: an unknown option (the message suggests the nearest known one); an invalid
                value.
            TypeError: not a mapping.
        """
        check_kind("options", options, (Mapping, type(None)), "a mapping of names to values")
        values: dict[str, Any] = {}
        for name, value in (options or {}).items():
            if name not in _OPTIONS:
                close = difflib.get_close_matches(str(name), _OPTIONS, 1)
                hint = (
                    f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_OPTIONS)}"
                )
                raise ValueError(f"unrecognised option {shorten(name)}: {hint}")
            field, read = _OPTIONS[name]
            values[field] = read(value, name)
        every = values.pop("", False)
        return cls(**{"graph_report": every, "execution_report": every, **values})


class Engine:
    """A program, checked, planned and ready to run.

    Args:
        graph: the variables and vertices.
        program: a program, or several by name.
        check_memory: whether a tile that overflows is an error. Otherwise it only shows in the
            profile.
        max_iterations: a while loop that exceeds this many turns is an error.
        options: options by Poplar's names: see `EngineOptions`. Others come from a JSON object in
            the environment variable DYNSPARSE_ENGINE_OPTIONS or else POPLAR_ENGINE_OPTIONS.
        print_to: where `PrintTensor` writes; defaults to standard error.
        numerics: whether to compute half and float data. If False, only integers and bools, which
            control a program, move and change; the profile is the same at a fraction of the time
            and memory, and floating-point tensors can be neither read nor written.
        stochastic_rounding: a seed: float16 results of vertices are rounded up or down at random,
            so that the expected value is exact; each vertex computes in float32 and rounds once
            as it writes. None rounds to nearest. Host transfers always round to nearest.

    Raises:
        MappingError: an element without a tile.
        LocalityError: a vertex connected to another tile's memory.
        RaceError: vertices of a compute set, or sides of a copy, that access the same element.
        OutOfMemoryError: a tile overflows; the message names its largest variables.
        ValueError: an unknown option or an invalid value.
        ProgramError: a program that contains itself or writes a constant; or, without numerics, a
            codelet that makes integers from floating-point data.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program | Mapping[str, Program],
        *,
        check_memory: bool = True,
        max_iterations: int = 1_000_000,
        numerics: bool = True,
        options: Mapping[str, Any] | None = None,
        print_to: TextIO | None = None,
        stochastic_rounding: int | None = None,
    ) -> None:
        self.options = EngineOptions.of_engine(options)
        graph = check_kind("graph", graph, Graph, "a Graph").root
        self.graph = graph
        max_iterations = check_integer("max_iterations", max_iterations, 1)
        check_flag("check_memory", check_memory)
        check_flag("numerics", numerics)
        named = dict(program) if isinstance(program, Mapping) else {"": program}
        for part in named.values():
            check_nesting(check_program(part))
        check_mapping(graph)
        check_memory = check_memory and not self.options.allow_out_of_memory
        liveness = analyse(graph, named.values())
        if check_memory:
            # The variables alone, before the simulation takes memory for them.
            check_fit(measure_memory(graph, [], [], liveness))
        self._state = State(graph, numerics=numerics, max_iterations=max_iterations)
        self._state.float_exceptions = self.options.float_exceptions
        if print_to is not None:
            self._state.print_to = print_to
        if stochastic_rounding is not None:
            seed = check_integer("stochastic_rounding", stochastic_rounding, 0)
            self._state.rounding = np.random.default_rng(seed)
        lowering = Lowering(self._state)
        self._programs = named
        self._contents = Contents(graph, liveness, self._state.rows)
        self._nodes: dict[str, Node] = {
            name: lowering.lower(part, name) for name, part in named.items()
        }
        self.memory_use = measure_memory(
            graph,
            lowering.vertex_sets,
            lowering.copies,
            liveness,
            self.options.worker_stack_bytes,
            len(self._state.steps),
        )
        sets = lowering.vertex_sets
        self.counts = {
            "tiles used": int((self.memory_use.data_bytes > 0).sum()),
            "variables": sum(len(group) for group in graph.variables.values()),
            "compute steps": lowering.compute_sets,
            "vertices": sum(v.count for v in sets),
            "edges": sum(v.count * len(v.edges) for v in sets),
            "exchanges": len(lowering.copies),
        }
        if check_memory:
            check_fit(self.memory_use)
        self._reported: list[Profile] = []
        if self.options.graph_report:
            self._write_report("memory.json", "Memory", [self.report()])

    def report(self) -> Profile:
        """A profile without a run: the program's counts and the memory it takes."""
        steps = [StepProfile(name, kind) for name, kind, _ in self._state.steps]
        counts = dict(self.counts)
        return Profile(self.graph.target, self.memory_use, steps, self._contents, counts=counts)

    def _write_report(self, name: str, title: str, runs: list[Profile]) -> None:
        self.options.folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.options.folder / name, json.dumps(build_document(title, runs)))

    @spanned("machine run")
    def run(self, program: str | None = None) -> Profile:
        """Run a program (by name, if there are several) and return its profile.

        Variables keep their values from run to run.
        """
        check_kind("program", program, (str, type(None)), "the name of a program")
        if program is None and len(self._nodes) != 1:
            raise ProgramError(f"say which program to run: {', '.join(self._nodes)}")
        name = next(iter(self._nodes)) if program is None else program
        if name not in self._nodes:
            raise ProgramError(f"no program {name!r}; there are: {', '.join(self._nodes)}")
        if self.options.allow_out_of_memory:
            check_fit(self.memory_use)
        profile = self.report()
        profile.name = name
        # The machine overflows to infinity without a word.
        with np.errstate(all="ignore"):
            self._nodes[name](profile)
        for row, (_, _, plan) in zip(profile.steps, self._state.steps, strict=True):
            if plan is not None and row.runs:
                row.tile_exchange = plan.exchange_per_tile * row.runs
                row.received_bytes = plan.received_bytes * row.runs
                row.sent_bytes = plan.sent_bytes * row.runs
                row.local_bytes = plan.local_bytes * row.runs
        spent = [step.cycles for step in profile.steps]
        rows = self._contents.rows
        profile.nodes = build_tree(self._programs[name], rows, spent, profile.choices)
        earlier = sum(run.name == name for run in self._reported)
        if self.options.execution_report and earlier < self.options.reported_runs:
            self._reported.append(profile)
            self._write_report("profile.json", "Runs", self._reported)
        return profile

    # Host access.

    def read(self, what: str | Tensor, replica: int = 0) -> np.ndarray:
        """A copy of a tensor's values, by handle name, variable name or tensor.

        Raises:
            KeyError: no handle or variable of that name, or several variables.
            ProgramError: floating-point data of an engine with `numerics=False`.
            ValueError: a replica that does not exist.
        """
        return self._state.read(what, replica)

    def write(self, what: str | Tensor, values: Any, replica: int | None = None) -> None:
        """Set a tensor's values, on all replicas or on one. They are rounded to its element type; a
        scalar fills it.

        Raises:
            KeyError: no handle or variable of that name, or several variables.
            ValueError: a wrong shape, or integers that do not fit the type.
            TypeError: fractional values for an integer type.
            ProgramError: a constant.
        """
        self._state.write(what, values, replica)

    def remote(self, name: str, replica: int = 0) -> np.ndarray:
        """The contents of a remote buffer, [rows, elements]; the host may read and write in place.

        Raises:
            KeyError: no such buffer. ValueError: a replica that does not exist.
        """
        buffer = _find("remote buffer", name, self.graph.remote_buffers)
        return self._state.remote[buffer][self._state.check_replica(replica)]

    def connect(self, stream: str, end: Any) -> None:
        """Connect a stream of the graph to the host: see `Host.connect`. Replicas take turns.

        Raises:
            KeyError: no such stream.
            TypeError, ValueError: an end that does not fit it.
        """
        self._state.host.connect(_find("stream", stream, self.graph.streams), end)


def _find(what: str, name: Any, known: Mapping[str, _T]) -> _T:
    """Look up a name; raises KeyError if it is not known."""
    if not isinstance(name, str) or name not in known:
        names = ", ".join(map(repr, known)) or "none"
        raise KeyError(f"no {what} named {shorten(name)}; there are: {names}")
    return known[name]
