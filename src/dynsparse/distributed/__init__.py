"""One model on many ranks: layers in rectangles, plans for them, stages of a pipeline."""

from dynsparse.distributed.cluster import Cluster, Link
from dynsparse.distributed.plan import Plan, make_plan
from dynsparse.distributed.split import gather, split
from dynsparse.distributed.stages import stages

__all__ = ["Cluster", "Link", "Plan", "gather", "make_plan", "split", "stages"]
