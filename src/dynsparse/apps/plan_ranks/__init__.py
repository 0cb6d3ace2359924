"""Over which grid of ranks a row of sparse layers is best spread: `dynsparse plan-ranks`."""

from dynsparse.apps.plan_ranks.options import Options
from dynsparse.apps.plan_ranks.run import run

__all__ = ["Options", "run"]
