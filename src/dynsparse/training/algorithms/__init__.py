"""The algorithms: `SparseTrainer` with its pieces chosen, one file per family."""

from dynsparse.training.algorithms.basic import SET, RigL, Static
from dynsparse.training.algorithms.deepr import DeepR
from dynsparse.training.algorithms.gradual import GMP, GraNet
from dynsparse.training.algorithms.mest import MEST
from dynsparse.training.algorithms.momentum import SNFS
from dynsparse.training.algorithms.registry import BY_NAME, Algorithm
from dynsparse.training.algorithms.topkast import TopKAST

__all__ = [
    "BY_NAME",
    "GMP",
    "MEST",
    "SET",
    "SNFS",
    "Algorithm",
    "DeepR",
    "GraNet",
    "RigL",
    "Static",
    "TopKAST",
]
