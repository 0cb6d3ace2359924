"""Dynamic sparse training: which blocks to drop and to grow, when, and what follows the pattern."""

from dynsparse.ranks import GrowRequest
from dynsparse.training.algorithms import (
    GMP,
    MEST,
    SET,
    SNFS,
    DeepR,
    GraNet,
    RigL,
    Static,
    TopKAST,
)
from dynsparse.training.block_repair import RepairedBlock, repair
from dynsparse.training.budgets import (
    Budget,
    Counts,
    GlobalBudget,
    GradualBudget,
    LayerBudget,
    MomentumBudget,
    SoftBudget,
    Survey,
)
from dynsparse.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from dynsparse.training.drop import DropScore, MagnitudeGradient, lowest, magnitude
from dynsparse.training.grow import (
    GradientGrowth,
    GradientStep,
    Growth,
    NoGrowth,
    RandomGrowth,
)
from dynsparse.training.history import DenseMomentum, History, LastStep, WindowMomentum
from dynsparse.training.memory import keep_memory
from dynsparse.training.muon import MuonAdamW
from dynsparse.training.optimizer_state import rewire_state
from dynsparse.training.schedule import (
    ConstantSchedule,
    CosineSchedule,
    ElasticSchedule,
    GradualSchedule,
    Schedule,
)
from dynsparse.training.telemetry import Telemetry
from dynsparse.training.trainer import SparseTrainer, scaled_step

__all__ = [
    "GMP",
    "MEST",
    "SET",
    "SNFS",
    "Budget",
    "CheckpointError",
    "ConstantSchedule",
    "CosineSchedule",
    "Counts",
    "DeepR",
    "DenseMomentum",
    "DropScore",
    "ElasticSchedule",
    "GlobalBudget",
    "GraNet",
    "GradientGrowth",
    "GradientStep",
    "GradualBudget",
    "GradualSchedule",
    "GrowRequest",
    "Growth",
    "History",
    "LastStep",
    "LayerBudget",
    "MagnitudeGradient",
    "MomentumBudget",
    "MuonAdamW",
    "NoGrowth",
    "RandomGrowth",
    "RepairedBlock",
    "RigL",
    "Schedule",
    "SoftBudget",
    "SparseTrainer",
    "Static",
    "Survey",
    "Telemetry",
    "TopKAST",
    "WindowMomentum",
    "keep_memory",
    "load_checkpoint",
    "lowest",
    "magnitude",
    "repair",
    "rewire_state",
    "save_checkpoint",
    "scaled_step",
]
