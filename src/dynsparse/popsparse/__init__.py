"""Sparse products on the tile machine: planner, partitioner, device program (PopSparse)."""

from dynsparse.popsparse import dense
from dynsparse.popsparse.dense_weights import DensePartitioner
from dynsparse.popsparse.device_layout import PlannedTensor
from dynsparse.popsparse.device_weights import SparseTensor
from dynsparse.popsparse.embedding import (
    create_indices_tensor,
    create_slice_tensor,
    embedding_slice,
    embedding_update_add,
)
from dynsparse.popsparse.encoded import Encoded, EncodedPattern, EncodingInfo
from dynsparse.popsparse.execution_model import PassTime, predict
from dynsparse.popsparse.formats import BSRMatrix, COOMatrix, CSCMatrix, CSRMatrix
from dynsparse.popsparse.fully_connected import (
    create_fully_connected_input,
    create_fully_connected_weights,
    fully_connected_dense_grad_w_serial_splits,
    fully_connected_forward,
    fully_connected_grad_a,
    fully_connected_grad_w,
)
from dynsparse.popsparse.layer import Layer
from dynsparse.popsparse.matmul import (
    create_sparse_dense_matmul_lhs,
    create_sparse_dense_matmul_rhs,
    sparse_dense_matmul,
)
from dynsparse.popsparse.options import Options, PlanConstraints
from dynsparse.popsparse.params import FullyConnectedParams, MatmulParams, SparsityParams
from dynsparse.popsparse.partitioner import Partitioner
from dynsparse.popsparse.plan import Method, Plan
from dynsparse.popsparse.plan_report import plan_report, plan_text
from dynsparse.popsparse.planner import PlanningCache, make_plan, matmul_plan
from dynsparse.popsparse.spilling import BucketOverflowError
from dynsparse.popsparse.tile_memory import tile_memory
from dynsparse.popsparse.torch_layer import machine_profiles

# Last, so that the function is what `popsparse.plan` names, not the module of the class.
from dynsparse.popsparse.planning import plan  # isort: skip

__all__ = [
    "BSRMatrix",
    "BucketOverflowError",
    "COOMatrix",
    "CSCMatrix",
    "CSRMatrix",
    "DensePartitioner",
    "Encoded",
    "EncodedPattern",
    "EncodingInfo",
    "FullyConnectedParams",
    "Layer",
    "MatmulParams",
    "Method",
    "Options",
    "Partitioner",
    "PassTime",
    "Plan",
    "PlanConstraints",
    "PlannedTensor",
    "PlanningCache",
    "SparseTensor",
    "SparsityParams",
    "create_fully_connected_input",
    "create_fully_connected_weights",
    "create_indices_tensor",
    "create_slice_tensor",
    "create_sparse_dense_matmul_lhs",
    "create_sparse_dense_matmul_rhs",
    "dense",
    "embedding_slice",
    "embedding_update_add",
    "fully_connected_dense_grad_w_serial_splits",
    "fully_connected_forward",
    "fully_connected_grad_a",
    "fully_connected_grad_w",
    "machine_profiles",
    "make_plan",
    "matmul_plan",
    "plan",
    "plan_report",
    "plan_text",
    "predict",
    "sparse_dense_matmul",
    "tile_memory",
]
