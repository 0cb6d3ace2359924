"""Sparse products on the tile machine: planner, partitioner, device program (PopSparse)."""

from dynsparse.popsparse import block_sparse, dense, tensor_ops
from dynsparse.popsparse.buckets.encoded import Encoded, EncodedPattern, EncodingInfo
from dynsparse.popsparse.buckets.partitioner import Partitioner
from dynsparse.popsparse.buckets.spilling import BucketOverflowError
from dynsparse.popsparse.device.dense import DensePartitioner
from dynsparse.popsparse.device.layout import PlannedTensor
from dynsparse.popsparse.device.weights import SparseTensor
from dynsparse.popsparse.embedding import (
    create_indices_tensor,
    create_slice_tensor,
    embedding_slice,
    embedding_update_add,
)
from dynsparse.popsparse.embedding_layer import EmbeddingLayer
from dynsparse.popsparse.estimates import (
    LayerEstimate,
    ModelEstimate,
    PassEstimate,
    UpdateEstimate,
    estimate,
)
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
from dynsparse.popsparse.planner.memory import tile_memory
from dynsparse.popsparse.planner.planning import plan
from dynsparse.popsparse.planner.report import plan_report, plan_text
from dynsparse.popsparse.planner.search import make_plan, matmul_plan
from dynsparse.popsparse.planner.stored import load_plan, save_plan
from dynsparse.popsparse.product.cache import PlanningCache
from dynsparse.popsparse.product.formats import BSRMatrix, COOMatrix, CSCMatrix, CSRMatrix
from dynsparse.popsparse.product.options import Options, PlanConstraints
from dynsparse.popsparse.product.params import FullyConnectedParams, MatmulParams, SparsityParams
from dynsparse.popsparse.product.plan import Method, Plan
from dynsparse.popsparse.product.update import Update
from dynsparse.popsparse.timing.model import PassTime, predict
from dynsparse.popsparse.torch_layer import machine_profiles

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
