"""The options of an engine, with Poplar's names and spelling of values.

Those that this machine can follow; any other is refused, also where Poplar has it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynsparse.checks import check_kind
from dynsparse.files.shorten import shortened


def _flag(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return bool(value == "true")
    raise ValueError(f"option {name!r} must be 'true' or 'false', got {shortened(value)}")


def _integer(value: Any, name: str) -> int:
    try:
        if isinstance(value, (bool, float)):
            raise ValueError
        found = int(value, 0) if isinstance(value, str) else int(value)
        if found < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"option {name!r} must be a whole number of 0 or more, got {shortened(value)}"
        ) from None
    return found


def _folder(value: Any, name: str) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"option {name!r} must be the path of a folder, got {shortened(value)}")
    return Path(value)


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "autoReport.all": _flag,
    "autoReport.directory": _folder,
    "autoReport.executionProfileProgramRunCount": _integer,
    "autoReport.outputExecutionProfile": _flag,
    "autoReport.outputGraphProfile": _flag,
    "debug.allowOutOfMemory": _flag,
    "debug.floatPointOpException": _flag,
    "target.workerStackSizeInBytes": _integer,
}


@dataclass(frozen=True)
class EngineOptions:
    """What the options say.

    Attributes:
        allow_out_of_memory: `debug.allowOutOfMemory`: a program that does not fit is planned and
            its memory reported; running it is what fails. (false)
        float_exceptions: `debug.floatPointOpException`: a vertex that divides by zero, overflows or
            makes NaN of numbers ends the run. (false: infinities and NaN go on)
        worker_stack_bytes: `target.workerStackSizeInBytes`: of each worker's stack, in the memory
            of every tile with vertices. (None: what is typical of all stacks, see
            `machine/facts.py`)
        graph_report, execution_report: `autoReport.outputGraphProfile`: a file `memory.json` as
            soon as the engine is there; `autoReport.outputExecutionProfile`: a file
            `profile.json` after runs. `autoReport.all` is both. (false)
        folder: `autoReport.directory`, made where it does not exist. (".")
        reported_runs: `autoReport.executionProfileProgramRunCount`: how many runs of each program
            are in `profile.json`, the first ones. (2)
    """

    allow_out_of_memory: bool = False
    float_exceptions: bool = False
    worker_stack_bytes: int | None = None
    graph_report: bool = False
    execution_report: bool = False
    folder: Path = Path()
    reported_runs: int = 2

    @classmethod
    def parse(cls, given: Any) -> EngineOptions:
        """From a mapping of names to values, as text or as they are.

        Raises:
            ValueError: an unknown option, with the nearest known one; a value of another kind.
            TypeError: not a mapping.
        """
        check_kind("options", given, (Mapping, type(None)), "a mapping of names to values")
        found: dict[str, Any] = {}
        for name, value in (given or {}).items():
            if name not in _PARSERS:
                close = difflib.get_close_matches(str(name), _PARSERS, 1)
                hint = (
                    f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_PARSERS)}"
                )
                raise ValueError(f"unrecognised option {shortened(name)}: {hint}")
            found[name] = _PARSERS[name](value, name)
        every = found.get("autoReport.all", False)
        return cls(
            found.get("debug.allowOutOfMemory", False),
            found.get("debug.floatPointOpException", False),
            found.get("target.workerStackSizeInBytes"),
            found.get("autoReport.outputGraphProfile", every),
            found.get("autoReport.outputExecutionProfile", every),
            found.get("autoReport.directory", Path()),
            found.get("autoReport.executionProfileProgramRunCount", 2),
        )
