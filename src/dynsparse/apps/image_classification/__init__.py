"""What every training on small images shares: settings, epochs, tests, checkpoints, reports.

`dynsparse.apps.image_classification.mnist` and `.transformer` add a network and its settings.
"""

from dynsparse.apps.image_classification.run import run
from dynsparse.apps.image_classification.training import ImageOptions, Training

__all__ = ["ImageOptions", "Training", "run"]
