"""Checkpoints: everything a training needs to continue bit for bit."""

from dynsparse.training.checkpoint.format import CheckpointError
from dynsparse.training.checkpoint.save_load import (
    Saving,
    load_checkpoint,
    read_extra,
    save_checkpoint,
)

__all__ = ["CheckpointError", "Saving", "load_checkpoint", "read_extra", "save_checkpoint"]
