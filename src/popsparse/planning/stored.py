"""Plans in files, for processes and machines that shall not plan."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from dynsparse.files.json_text import parse_json
from dynsparse.files.plain_objects import PlainObjects
from dynsparse.files.whole import write_text_whole
from dynsparse.typed import typed
from dynsparse.version import __version__
from popsparse.machine.target import Target
from popsparse.planning.dense import DensePlan
from popsparse.planning.dense_cycles import AMP, HMAC
from popsparse.planning.options import Options, PlanConstraints
from popsparse.planning.params import DataType, FullyConnectedParams, SparsityParams, data_type
from popsparse.planning.plan import (
    BucketSizes,
    Method,
    PassCost,
    Plan,
    Search,
    Sizes,
    Term,
)

_FORMAT = "dynsparse plan 1"

SOURCES = (
    "planning",
    "machine/target.py",
    "machine/dtypes.py",
)
"""Files and folders of the package that settle what a plan is."""

_OBJECTS = PlainObjects(
    (
        *(Target, SparsityParams, FullyConnectedParams, PlanConstraints, Options),
        *(Sizes, BucketSizes, Term, PassCost, Search, AMP, HMAC, DensePlan, Plan),
    ),
    # One object for each data type: the planner asks whether two are the same.
    {DataType: (str, data_type), Method: (lambda method: method.value, Method)},
)


@cache
def _planner() -> str:
    """A hash of the source text of the planner; a plan of another is not this one's.

    Raises:
        OSError: there is no source text here.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in SOURCES:
        place = package / source
        for file in sorted(place.glob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{file.name}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def stored_plan(plan: Plan) -> dict[str, Any]:
    """A plan as JSON has it, with what tells whether it is whole and this planner's."""
    content = _OBJECTS.to_plain(plan)
    return {
        "format": _FORMAT,
        "version": __version__,
        "planner": _planner(),
        "checksum": _checksum(content),
        "plan": content,
    }


def read_plan(stored: Any) -> Plan:
    """The plan that `stored_plan` was given.

    Raises:
        ValueError: something else, a damaged one, or one of another version of the planner.
    """
    if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
        raise ValueError("expected a plan as dynsparse saves it, got something else")
    if stored.get("planner") != _planner():
        raise ValueError(
            f"the plan was made by another planner than this one's, of dynsparse {__version__}: "
            "make it with the same version"
        )
    content = stored.get("plan")
    if stored.get("checksum") != _checksum(content):
        raise ValueError("the plan is damaged: its checksum differs; save it anew")
    return _plan(content)


def _plan(content: Any) -> Plan:
    try:
        found = _OBJECTS.from_plain(content)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None
    whole = isinstance(found, Plan) and isinstance(found.target, Target)
    if not (whole and isinstance(found.search, Search)):
        raise ValueError("expected a plan as dynsparse saves it, got something else")
    return found


@typed
def save_plan(plan: Plan, file: str | os.PathLike[str]) -> None:
    """Write a plan to a file, for machines and processes that shall not make it again.

    Args:
        plan: as `popsparse.plan`, `make_plan` or `matmul_plan` gives it.
        file: where to; it appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
        TypeError: a plan for a target, or of options, of a class of your own.
    """
    write_text_whole(Path(file), json.dumps(stored_plan(plan), allow_nan=False))


@typed
def load_plan(file: str | os.PathLike[str]) -> Plan:
    """The plan that `save_plan` wrote. No target is asked for: it stands in the plan.

    Raises:
        OSError: the file cannot be read.
        ValueError: another file, a damaged one, or a plan of another version of the planner.
    """
    content = Path(file).read_bytes()
    try:
        return read_plan(parse_json(content))
    except ValueError as error:
        raise ValueError(f"{os.fspath(file)}: {error}") from None


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
