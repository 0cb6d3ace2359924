"""An option that was given and would be ignored is refused; the registry is the options' own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dynsparse.apps.common.option import Need, Option, flag, listed, options_of


def check_applies(options: Any, given: Collection[str]) -> None:
    """Raise ValueError for the first of the options `given` that does not apply to the others.

    Args:
        options: all of them together, as they will hold.
        given: the names of those that somebody asked for; defaults, and what a preset or a
            checkpoint says, may be of no use.
    """
    for name, known in options_of(type(options)).items():
        if name not in given:
            continue
        method = getattr(options, "method", None)
        if method is not None and method not in known.methods:
            raise ValueError(
                f"{_flags(name, known)}: applies to --method {listed(known.methods)}, got --method "
                f"{method}: leave it out"
            )
        for need in known.needs:
            if need is TRAINS and known.defines in options.binding:
                continue  # it is compared with what the checkpoint was trained with
            if not need.holds(options):
                raise ValueError(
                    f"{_flags(name, known)}: applies to {need.words}, got {need.got(options)}: "
                    "leave it out"
                )


def _flags(name: str, known: Option) -> str:
    other = "" if known.complement is None else f", --{flag(known.complement)}"
    return f"--{flag(name)}{other}"


SPARSE = Need(
    "networks with sparse layers",
    lambda o: o.has_sparse_layers,
    lambda o: "dense layers alone",
    shown=False,
)
TRAINS = Need("runs that train", lambda o: o.trains, lambda o: o.how_it_runs, shown=False)
CHECKPOINTS = Need("runs with --checkpoint-path", lambda o: o.checkpoint_path is not None)
FOLDERS = Need(
    "runs with --checkpoint-path or --records-path",
    lambda o: o.checkpoint_path is not None or o.records_path is not None,
)
