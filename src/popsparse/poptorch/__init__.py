"""PopTorch-style loops: many steps a call, with the batch arithmetic of PopTorch's options.

Scripts for Graphcore's PopTorch run here with their import changed,

    from popsparse import poptorch

on whatever processor the model is on, or on the tile machine. Source: PopTorch user guide,
"Running models", "Efficient data batching".
"""

from popsparse.compiled.blocks import BeginBlock, Block
from popsparse.poptorch.data_loader import DataLoader
from popsparse.poptorch.model import (
    WrappedModel,
    identity_loss,
    inferenceModel,
    trainingModel,
)
from popsparse.poptorch.options import (
    AnchorMode,
    ConnectionType,
    DataLoaderMode,
    Options,
    OutputMode,
    ReductionType,
)

__all__ = [
    "AnchorMode",
    "BeginBlock",
    "Block",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Options",
    "OutputMode",
    "ReductionType",
    "WrappedModel",
    "identity_loss",
    "inferenceModel",
    "trainingModel",
]
