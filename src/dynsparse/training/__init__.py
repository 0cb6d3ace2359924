"""Dynamic sparse training: which blocks leave, which join, when, and what follows them."""

from dynsparse.training.algorithms import SET, RigL, Static
from dynsparse.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from dynsparse.training.drop import DropScore, lowest, magnitude
from dynsparse.training.grow import GradientGrowth, Growth, RandomGrowth
from dynsparse.training.optimizer_state import rewire_state
from dynsparse.training.schedule import (
    ApplicationCosine,
    ConstantSchedule,
    CosineSchedule,
    Schedule,
)
from dynsparse.training.trainer import SparseTrainer

__all__ = [
    "SET",
    "ApplicationCosine",
    "CheckpointError",
    "ConstantSchedule",
    "CosineSchedule",
    "DropScore",
    "GradientGrowth",
    "Growth",
    "RandomGrowth",
    "RigL",
    "Schedule",
    "SparseTrainer",
    "Static",
    "load_checkpoint",
    "lowest",
    "magnitude",
    "rewire_state",
    "save_checkpoint",
]
