"""A transformer with truly sparse projections on the rows of pictures: `run(Options(...))`."""

from dynsparse.apps.mnist_transformer.options import Options
from dynsparse.apps.mnist_transformer.training import run

__all__ = ["Options", "run"]
