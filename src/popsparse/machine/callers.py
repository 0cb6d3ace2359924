"""Who made something: the calls that led to it, for people who read a profile."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

Callers = tuple[tuple[CodeType, int], ...]
"""Code and line of calls, the nearest first."""

_ROOM = str(Path(__file__).parent)
_SOURCE = Path(__file__).parents[2]
_PACKAGES = tuple(str(_SOURCE / name) for name in ("popsparse", "dynsparse"))
_TYPED = str(_SOURCE / "dynsparse" / "typed.py")
_NEAREST = 2


def callers() -> Callers:
    """The two nearest calls from outside the tile machine, and the nearest from outside the
    library, unless some installed package made it.

    Nothing but code objects is kept, so no variable lives longer; texts are made when asked for.
    """
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_PACKAGES):
            if len(found) < _NEAREST and not file.startswith(_ROOM) and file != _TYPED:
                found.append((code, frame.f_lineno))
        else:
            if not (file.startswith("<frozen") or "site-packages" in file):
                found.append((code, frame.f_lineno))
            break
    return tuple(found)


def in_words(made_by: Callers) -> list[str]:
    """Each call as "file:line function"; files of the library by their path in it, others by their
    name, so that a profile does not tell where its maker's files lie."""
    return [f"{_file(code.co_filename)}:{line} {code.co_name}" for code, line in made_by]


def _file(name: str) -> str:
    path = Path(name)
    return path.relative_to(_SOURCE).as_posix() if name.startswith(_PACKAGES) else path.name
