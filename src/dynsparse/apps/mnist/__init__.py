"""Train MNIST, Fashion-MNIST or the digits with truly sparse layers: `run(Options(...))`."""

from dynsparse.apps.mnist.options import CHOICES, Options
from dynsparse.apps.mnist.run import run

__all__ = ["CHOICES", "Options", "run"]
