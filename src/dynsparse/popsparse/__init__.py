"""Sparse products on the tile machine: planner, partitioner, device program (PopSparse)."""

from dynsparse.popsparse import dense
from dynsparse.popsparse.execution_model import PassTime, predict
from dynsparse.popsparse.options import Options, PlanConstraints
from dynsparse.popsparse.params import FullyConnectedParams, MatmulParams, SparsityParams
from dynsparse.popsparse.plan import Method, Plan
from dynsparse.popsparse.plan_report import plan_report, plan_text
from dynsparse.popsparse.planner import PlanningCache, make_plan, matmul_plan
from dynsparse.popsparse.tile_memory import tile_memory

# Last, so that the function is what `popsparse.plan` names, not the module of the class.
from dynsparse.popsparse.planning import plan  # isort: skip

__all__ = [
    "FullyConnectedParams",
    "MatmulParams",
    "Method",
    "Options",
    "PassTime",
    "Plan",
    "PlanConstraints",
    "PlanningCache",
    "SparsityParams",
    "dense",
    "make_plan",
    "matmul_plan",
    "plan",
    "plan_report",
    "plan_text",
    "predict",
    "tile_memory",
]
