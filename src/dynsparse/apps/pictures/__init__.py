"""What every training on small pictures shares: settings, epochs, tests, checkpoints, reports.

`dynsparse.apps.mnist` and `dynsparse.apps.mnist_transformer` add a network and its settings.
"""

from dynsparse.apps.pictures.options import CHOICES, PictureOptions
from dynsparse.apps.pictures.run import run
from dynsparse.apps.pictures.training import Training

__all__ = ["CHOICES", "PictureOptions", "Training", "run"]
