"""The choices of PopTorch's options, by its names."""

from __future__ import annotations

from enum import Enum

__all__ = ["AnchorMode", "DataLoaderMode", "OutputMode", "ReductionType"]


class OutputMode(Enum):
    """Which of a call's batches have their outputs returned."""

    All = "all"
    Final = "final"
    Sum = "sum"
    EveryN = "every n"


AnchorMode = OutputMode
"""The older name."""


class ReductionType(Enum):
    """How the gradients of the batches of one step become one."""

    Mean = "mean"
    Sum = "sum"


class DataLoaderMode(Enum):
    """Whether a call's batch is read when it is asked for, or before, in the background."""

    Sync = "sync"
    Async = "async"
