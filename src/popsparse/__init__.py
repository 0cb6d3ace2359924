"""Sparse products on the tile machine: planner, partitioner, device program (PopSparse)."""

from popsparse import block_sparse, dense, machine, tensor_ops
from popsparse.embedding import (
    create_indices_tensor,
    create_slice_tensor,
    embedding_slice,
    embedding_update_add,
)
from popsparse.embedding_layer import EmbeddingLayer
from popsparse.encoding.encoded import Encoded, EncodedPattern, EncodingInfo
from popsparse.encoding.formats import BSRMatrix, COOMatrix, CSCMatrix, CSRMatrix
from popsparse.encoding.partitioner import Partitioner
from popsparse.encoding.spilling import BucketOverflowError
from popsparse.estimates import (
    LayerEstimate,
    ModelEstimate,
    PassEstimate,
    UpdateEstimate,
    estimate,
)
from popsparse.fully_connected import (
    create_fully_connected_input,
    create_fully_connected_weights,
    fully_connected_dense_grad_w_serial_splits,
    fully_connected_forward,
    fully_connected_grad_a,
    fully_connected_grad_w,
)
from popsparse.layer import Layer
from popsparse.machine import Target
from popsparse.matmul import (
    create_sparse_dense_matmul_lhs,
    create_sparse_dense_matmul_rhs,
    sparse_dense_matmul,
)
from popsparse.planning.cache import PlanningCache
from popsparse.planning.memory import tile_memory
from popsparse.planning.options import Options, PlanConstraints
from popsparse.planning.params import FullyConnectedParams, MatmulParams, SparsityParams
from popsparse.planning.plan import Method, Plan
from popsparse.planning.planning import plan
from popsparse.planning.report import plan_report, plan_text
from popsparse.planning.search import make_plan, matmul_plan
from popsparse.planning.stored import load_plan, save_plan
from popsparse.planning.update import Update
from popsparse.programs.dense import DensePartitioner
from popsparse.programs.layout import PlannedTensor
from popsparse.programs.weights import SparseTensor
from popsparse.timing.model import PassTime, predict
from popsparse.torch_layer import machine_profiles

__all__ = [
    "BSRMatrix",
    "BucketOverflowError",
    "COOMatrix",
    "CSCMatrix",
    "CSRMatrix",
    "DensePartitioner",
    "EmbeddingLayer",
    "Encoded",
    "EncodedPattern",
    "EncodingInfo",
    "FullyConnectedParams",
    "Layer",
    "LayerEstimate",
    "MatmulParams",
    "Method",
    "ModelEstimate",
    "Options",
    "Partitioner",
    "PassEstimate",
    "PassTime",
    "Plan",
    "PlanConstraints",
    "PlannedTensor",
    "PlanningCache",
    "SparseTensor",
    "SparsityParams",
    "Target",
    "Update",
    "UpdateEstimate",
    "block_sparse",
    "create_fully_connected_input",
    "create_fully_connected_weights",
    "create_indices_tensor",
    "create_slice_tensor",
    "create_sparse_dense_matmul_lhs",
    "create_sparse_dense_matmul_rhs",
    "dense",
    "embedding_slice",
    "embedding_update_add",
    "estimate",
    "fully_connected_dense_grad_w_serial_splits",
    "fully_connected_forward",
    "fully_connected_grad_a",
    "fully_connected_grad_w",
    "load_plan",
    "machine",
    "machine_profiles",
    "make_plan",
    "matmul_plan",
    "plan",
    "plan_report",
    "plan_text",
    "predict",
    "save_plan",
    "sparse_dense_matmul",
    "tensor_ops",
    "tile_memory",
]
