"""Ready-made codelets. Each estimate names its source."""

from popsparse.machine.codelets.control import (
    DECREMENT,
    EQUAL_ZERO,
    INCREMENT,
    LOGICAL_NOT,
    NOT_ZERO,
    TOGGLE,
)
from popsparse.machine.codelets.elementary import (
    ADD,
    ADD_SCALED,
    CAST,
    COPY,
    DOT,
    FILL,
    MULTIPLY,
    REDUCE,
)

__all__ = [
    "ADD",
    "ADD_SCALED",
    "CAST",
    "COPY",
    "DECREMENT",
    "DOT",
    "EQUAL_ZERO",
    "FILL",
    "INCREMENT",
    "LOGICAL_NOT",
    "MULTIPLY",
    "NOT_ZERO",
    "REDUCE",
    "TOGGLE",
]
