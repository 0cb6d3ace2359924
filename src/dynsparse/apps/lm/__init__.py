"""A language model in the manner of GPT-2 from sparse layers: `run(Options(...))`."""

from dynsparse.apps.lm.options import PRESETS, Options, preset
from dynsparse.apps.lm.run import run

__all__ = ["PRESETS", "Options", "preset", "run"]
