"""Checkpoints: everything a training needs to go on bit for bit, in one file."""

from dynsparse.training.checkpoint.reading import CheckpointError
from dynsparse.training.checkpoint.training_state import (
    load_checkpoint,
    read_extra,
    save_checkpoint,
)

__all__ = ["CheckpointError", "load_checkpoint", "read_extra", "save_checkpoint"]
