"""Train MNIST, Fashion-MNIST or the digits with truly sparse layers: `run(Options(...))`."""

from dynsparse.apps.mnist.options import CHOICES, Options
from dynsparse.apps.mnist.training import run

__all__ = ["CHOICES", "Options", "run"]
