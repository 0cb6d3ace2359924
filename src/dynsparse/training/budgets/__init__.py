"""How many blocks each layer loses and gains in an update, one budget per file or family."""

from dynsparse.training.budgets.basic import (
    Budget,
    Counts,
    GlobalBudget,
    LayerBudget,
    SoftBudget,
    Survey,
    check_one_block_size,
)
from dynsparse.training.budgets.gradual import GradualBudget
from dynsparse.training.budgets.momentum import MomentumBudget

__all__ = [
    "Budget",
    "Counts",
    "GlobalBudget",
    "GradualBudget",
    "LayerBudget",
    "MomentumBudget",
    "SoftBudget",
    "Survey",
    "check_one_block_size",
]
