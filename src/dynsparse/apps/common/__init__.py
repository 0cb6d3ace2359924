"""What every training shares: options, methods, checkpoints, outputs, the frame of a run."""

from dynsparse.apps.common.options import TrainingOptions
from dynsparse.apps.common.run import run_application
from dynsparse.apps.common.training import Training

__all__ = ["Training", "TrainingOptions", "run_application"]
