"""Train MNIST, Fashion-MNIST or the digits with truly sparse layers: `run(Options(...))`."""

from dynsparse.apps.pictures.mnist.options import Options
from dynsparse.apps.pictures.mnist.training import run

__all__ = ["Options", "run"]
