"""Train a wide residual network with sparse convolutions on CIFAR-10: `run(Options(...))`."""

from dynsparse.apps.pictures.cifar.options import Options
from dynsparse.apps.pictures.cifar.training import run

__all__ = ["Options", "run"]
