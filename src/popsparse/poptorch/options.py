"""Options of PopTorch-style models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from dynsparse._core.checks import (
    check_flag,
    check_integer,
    check_kind,
    check_within,
    shorten,
)


class OutputMode(Enum):
    """The batches of a call whose outputs are returned."""

    All = "all"
    Final = "final"
    Sum = "sum"
    EveryN = "every n"


AnchorMode = OutputMode
"""The older name."""


class ReductionType(Enum):
    """How the gradients of the batches of one step are reduced."""

    Mean = "mean"
    Sum = "sum"


class DataLoaderMode(Enum):
    """Whether a batch is read on request, or ahead of it in the background."""

    Sync = "sync"
    Async = "async"


class ConnectionType(Enum):
    """When a model is attached and can be called: Always, from the first call on (OnDemand), or
    Never, which only compiles."""

    Always = "always"
    OnDemand = "on demand"
    Never = "never"


class Options:
    """The options of PopTorch's `Options` that apply without an IPU.

        options = poptorch.Options().deviceIterations(50)
        options.Training.gradientAccumulation(4)

    Every setter checks its argument and returns the options. Other options of PopTorch raise an
    AttributeError that lists the available ones.

    Attributes:
        Training: gradientAccumulation, accumulationAndReplicationReductionType.
        Precision: enableFloatingPointExceptions, setPartialsType, enableStochasticRounding.
    """

    def __init__(self) -> None:
        self.device_iterations = 1
        self.replication_factor = 1
        self.output_mode: OutputMode | None = None
        self.output_every = 1
        self.random_seed: int | None = None
        self.synthetic_data = False
        self.cache_folder: Path | None = None
        self.connection = ConnectionType.Always
        self.available_memory: float | None = None
        self.profile_folder: Path | None = None
        self.model_name = "model"
        self.Training = TrainingOptions()
        self.Precision = PrecisionOptions()

    def deviceIterations(self, count: int) -> Options:
        """Number of steps (training) or batches (inference) of a call. Defaults to 1."""
        self.device_iterations = check_integer("deviceIterations", count, 1)
        return self

    def replicationFactor(self, count: int) -> Options:
        """Number of replicas that share a step; here they take turns in one process. Defaults to 1.

        Gradients and weights are the same as with that many replicas. To use several processes,
        wrap the model in `DistributedDataParallel` instead.
        """
        self.replication_factor = check_integer("replicationFactor", count, 1)
        return self

    def outputMode(self, mode: OutputMode, output_return_period: int | None = None) -> Options:
        """Which outputs a call returns: All, the Final, their Sum, or EveryN.

        Defaults to All for inference and Final for training.

        Args:
            output_return_period: the n of EveryN; it must divide deviceIterations.
        """
        check_kind("outputMode", mode, OutputMode, "one of poptorch.OutputMode")
        if (mode is OutputMode.EveryN) != (output_return_period is not None):
            raise ValueError("output_return_period is for OutputMode.EveryN, which needs it")
        if output_return_period is not None:
            self.output_every = check_integer("output_return_period", output_return_period, 1)
        self.output_mode = mode
        return self

    def anchorMode(self, mode: OutputMode, anchor_return_period: int | None = None) -> Options:
        """The older name of `outputMode`."""
        return self.outputMode(mode, anchor_return_period)

    def randomSeed(self, seed: int) -> Options:
        """Seed torch's generators when a model is made with these options, and the data loader."""
        self.random_seed = check_integer("randomSeed", seed, 0)
        return self

    def enableSyntheticData(self, enabled: bool = True) -> Options:
        """Compute on one batch of normally distributed numbers (zeros for integers, such as labels)
        instead of the data, which is not read after the first batch."""
        self.synthetic_data = check_flag("enableSyntheticData", enabled)
        return self

    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Options:
        """Cache compiled code in this folder, so that the next process does not compile again; None
        for the environment variable POPTORCH_CACHE_DIR, or else the compiler's default."""
        self.cache_folder = None if path is None else Path(path)
        return self

    def connectionType(self, kind: ConnectionType) -> Options:
        """When a model is attached. Defaults to Always."""
        check_kind("connectionType", kind, ConnectionType, "one of poptorch.ConnectionType")
        self.connection = kind
        return self

    def setAvailableMemoryProportion(self, proportions: Mapping[str, float]) -> Options:
        """The part of a tile's memory that sparse layers' products may use for temporary data, such
        as {"IPU0": 0.5}: an option of the planner, for models with a target."""
        name = "setAvailableMemoryProportion"
        check_kind(name, proportions, Mapping, 'a mapping such as {"IPU0": 0.5}')
        if list(proportions) != ["IPU0"]:
            raise ValueError(
                f'{name}: a model computes on one machine, "IPU0", got {shorten(proportions)}'
            )
        self.available_memory = check_within(name, proportions["IPU0"], "(0, 1]")
        return self

    def enableProfiling(self, profile_dir: str | os.PathLike[str] | None = None) -> Options:
        """Write a page about the last run of each sparse layer after every call, for models with a
        target: to this folder, by default the current one, as NAME-LAYER.html."""
        self.profile_folder = Path(profile_dir or ".")
        return self

    def modelName(self, name: str) -> Options:
        """The NAME in the files of `enableProfiling`. Defaults to "model"."""
        check_kind("modelName", name, str, "a name")
        if not name or set(name) & set("/\\\0"):
            raise ValueError(f"modelName must be the beginning of a file name, got {name!r}")
        self.model_name = name
        return self

    def __getattr__(self, name: str) -> Any:
        setters = [
            name for name, what in vars(Options).items() if callable(what) and name[0] != "_"
        ]
        raise AttributeError(
            f"poptorch.Options has no {shorten(name)} here: it has no equivalent without an IPU. "
            "Available options: " + ", ".join(setters)
        )

    @property
    def batches_per_step(self) -> int:
        return self.replication_factor * self.Training.gradient_accumulation


class TrainingOptions:
    """Options that apply only to training."""

    def __init__(self) -> None:
        self.gradient_accumulation = 1
        self.reduction = ReductionType.Mean

    def gradientAccumulation(self, count: int) -> TrainingOptions:
        """Number of batches of one optimizer step. Defaults to 1."""
        self.gradient_accumulation = check_integer("Training.gradientAccumulation", count, 1)
        return self

    def accumulationAndReplicationReductionType(self, kind: ReductionType) -> TrainingOptions:
        """Whether a step uses the Mean of its batches' gradients (the default) or their Sum."""
        check_kind(
            "Training.accumulationAndReplicationReductionType",
            kind,
            ReductionType,
            "one of poptorch.ReductionType",
        )
        self.reduction = kind
        return self


class PrecisionOptions:
    """Options of arithmetic."""

    def __init__(self) -> None:
        self.floating_point_exceptions = False

    def enableFloatingPointExceptions(self, enabled: bool) -> PrecisionOptions:
        """Raise FloatingPointError if an output or a loss is infinite or NaN."""
        name = "Precision.enableFloatingPointExceptions"
        self.floating_point_exceptions = check_flag(name, enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> PrecisionOptions:
        """The type in which products are accumulated: float32 only."""
        if dtype not in (torch.float, torch.float32):
            raise ValueError(
                "Precision.setPartialsType: sums of products are float32 here, got "
                f"{shorten(dtype)}"
            )
        return self

    def enableStochasticRounding(self, enabled: bool) -> PrecisionOptions:
        """Only False: the host rounds to nearest; for the tile machine see `popsparse.compile`."""
        if check_flag("Precision.enableStochasticRounding", enabled):
            raise ValueError(
                "Precision.enableStochasticRounding: processors here round to nearest: leave it "
                "False, or train with popsparse.compile(..., stochastic_rounding=seed)"
            )
        return self
