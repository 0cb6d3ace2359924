"""What every training on small pictures shares: settings, epochs, tests, checkpoints, reports.

`dynsparse.apps.pictures.mnist` and `.transformer` add a network and its settings.
"""

from dynsparse.apps.pictures.run import run
from dynsparse.apps.pictures.training import PictureOptions, Training

__all__ = ["PictureOptions", "Training", "run"]
