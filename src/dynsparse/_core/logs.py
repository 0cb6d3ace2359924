"""Warnings, and logs through Python's `logging`, under names that begin with "dynsparse.".

A program that has set up logging of its own sees them there. `DYNSPARSE_LOG_LEVEL` shows them
without it: OFF, ERROR, WARNING, INFO or DEBUG (Poplar's ERR, WARN and TRACE are taken, too); then
`DYNSPARSE_LOG_DEST` says where they go: stderr, stdout, or a file, which they are added to.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_LEVELS = {
    "OFF": logging.CRITICAL + 1,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "ERR": logging.ERROR,
    "WARN": logging.WARNING,
    "TRACE": logging.DEBUG,
}
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_logger = logging.getLogger("dynsparse")
_logger.addHandler(logging.NullHandler())
_configured: tuple[str, str] | None = None


class _Stream(logging.StreamHandler):
    """Writes to the current `sys.stderr` or `sys.stdout`, which programs may replace."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._name_of_stream = name

    @property
    def stream(self) -> object:
        return getattr(sys, self._name_of_stream)

    @stream.setter
    def stream(self, value: object) -> None:
        return


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that shows the line of the user's code: the innermost one outside of this
    library and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in ("dynsparse", "popsparse", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def configure() -> None:
    """Set up logging as the environment variables say, if they have changed.

    Raises:
        ValueError: an invalid level or destination.
    """
    global _configured
    level = os.environ.get("DYNSPARSE_LOG_LEVEL", "").strip()
    place = os.environ.get("DYNSPARSE_LOG_DEST", "").strip()
    if (level, place) == _configured:
        return
    if level and level.upper() not in _LEVELS:
        raise ValueError(
            f"DYNSPARSE_LOG_LEVEL: expected OFF, ERROR, WARNING, INFO or DEBUG, got {level!r}"
        )
    if place and not level:
        raise ValueError(
            "DYNSPARSE_LOG_DEST: expected DYNSPARSE_LOG_LEVEL with it, got none: set it to OFF, "
            "ERROR, WARNING, INFO or DEBUG"
        )
    handler = _make_handler(place or "stderr") if level else None
    for old in [h for h in _logger.handlers if getattr(h, "of_dynsparse", False)]:
        _logger.removeHandler(old)
        old.close()
    _logger.propagate = handler is None
    _logger.setLevel(_LEVELS[level.upper()] if level else logging.NOTSET)
    if handler is not None:
        handler.of_dynsparse = True  # type: ignore[attr-defined]
        handler.setFormatter(logging.Formatter(_FORMAT))
        _logger.addHandler(handler)
    _configured = level, place


def _make_handler(place: str) -> logging.Handler:
    if place in ("stderr", "stdout"):
        return _Stream(place)
    try:
        return logging.FileHandler(Path(place), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"DYNSPARSE_LOG_DEST: expected stderr, stdout or a file that can be written, got "
            f"{place!r} ({reason})"
        ) from None
