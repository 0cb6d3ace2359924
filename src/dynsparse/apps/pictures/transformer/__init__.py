"""A transformer with truly sparse projections on the rows of pictures: `run(Options(...))`."""

from dynsparse.apps.pictures.transformer.options import Options
from dynsparse.apps.pictures.transformer.training import run

__all__ = ["Options", "run"]
