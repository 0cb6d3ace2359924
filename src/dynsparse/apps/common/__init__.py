"""What every complete training shares: options, methods, checkpoints, displays, a frame to run.

An option is a field of a dataclass made by `option`, which says all there is to know of it.
"""

from dynsparse.apps.common.option import METHODS, again, option, options_of
from dynsparse.apps.common.options import TrainingOptions
from dynsparse.apps.common.run import run_with
from dynsparse.apps.common.training import Training

__all__ = ["METHODS", "Training", "TrainingOptions", "again", "option", "options_of", "run_with"]
