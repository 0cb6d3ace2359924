"""Products with a sparse matrix whose pattern is known when the program is made.

The names follow PopSparse's `static_` API. Each function adds variables and steps to a machine's
`Graph` and `Sequence`; an `Engine` runs them. The short way, without a machine:

    plan = static.plan(pattern, n, dtype="float16", target=Target.bow())
    static.predict(plan).tflops

Source: Li, Z. et al., arXiv:2303.16999; section 6 of docs/popsparse-formulas.md.
"""

from popsparse.planning.options import Options
from popsparse.planning.params import MatmulParams
from popsparse.planning.plan import PlanningCache
from popsparse.planning.static import make_plan
from popsparse.planning.static_layout import StaticPlan
from popsparse.plans import plan_report, plan_text, predict, tile_memory
from popsparse.programs.layout import PlannedTensor
from popsparse.static.matmul import (
    Partitioner,
    SparseTensor,
    create_dense_sparse_matmul_lhs,
    create_dense_sparse_matmul_rhs,
    create_sparse_dense_matmul_lhs,
    create_sparse_dense_matmul_rhs,
    dense_sparse_matmul,
    plan,
    sparse_dense_matmul,
)

__all__ = [
    "MatmulParams",
    "Options",
    "Partitioner",
    "PlannedTensor",
    "PlanningCache",
    "SparseTensor",
    "StaticPlan",
    "create_dense_sparse_matmul_lhs",
    "create_dense_sparse_matmul_rhs",
    "create_sparse_dense_matmul_lhs",
    "create_sparse_dense_matmul_rhs",
    "dense_sparse_matmul",
    "make_plan",
    "plan",
    "plan_report",
    "plan_text",
    "predict",
    "sparse_dense_matmul",
    "tile_memory",
]
