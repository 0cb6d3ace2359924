"""Sparse products on the tile machine: planner, partitioner, device program (PopSparse)."""

from functools import partial as _partial

from dynsparse.nn.backends import register_backend as _register_backend
from popsparse import block_sparse, dense, machine, tensor_ops
from popsparse.compiled import CompiledModel, compile
from popsparse.embedding import (
    EmbeddingLayer,
    create_indices_tensor,
    create_slice_tensor,
    embedding_slice,
    embedding_update_add,
)
from popsparse.encoding.partitioner import Encoded, EncodedPattern, EncodingInfo, Partitioner
from popsparse.encoding.spilling import BucketOverflowError
from popsparse.estimates import (
    LayerEstimate,
    ModelEstimate,
    PassEstimate,
    UpdateEstimate,
    estimate,
)
from popsparse.formats import COOMatrix, CSCMatrix, CSRMatrix
from popsparse.layer import Layer
from popsparse.machine import Target
from popsparse.machine.target import PRESETS as _PRESETS
from popsparse.planning.options import Options, PlanConstraints, Update
from popsparse.planning.params import FullyConnectedParams, MatmulParams, SparsityParams
from popsparse.planning.plan import Method, Plan, PlanningCache
from popsparse.planning.search import make_plan, matmul_plan, plan
from popsparse.plans import plan_report, plan_text, predict, tile_memory
from popsparse.products import (
    create_fully_connected_input,
    create_fully_connected_weights,
    create_sparse_dense_matmul_lhs,
    create_sparse_dense_matmul_rhs,
    fully_connected_dense_grad_w_serial_splits,
    fully_connected_forward,
    fully_connected_grad_a,
    fully_connected_grad_w,
    sparse_dense_matmul,
)
from popsparse.programs.dense_weights import DensePartitioner
from popsparse.programs.layout import PlannedTensor, SparseTensor
from popsparse.timing import PassTime
from popsparse.torch_layer import TileMachine as _TileMachine
from popsparse.torch_layer import machine_profiles
from popsparse.triplets import (
    SparseFcLayer,
    Triplets,
    dense_from_triplets,
    mask_from_triplets,
    triplets_from_dense,
)

__all__ = [
    "BucketOverflowError",
    "COOMatrix",
    "CSCMatrix",
    "CSRMatrix",
    "CompiledModel",
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
    "SparseFcLayer",
    "SparseTensor",
    "SparsityParams",
    "Target",
    "Triplets",
    "Update",
    "UpdateEstimate",
    "block_sparse",
    "compile",
    "create_fully_connected_input",
    "create_fully_connected_weights",
    "create_indices_tensor",
    "create_slice_tensor",
    "create_sparse_dense_matmul_lhs",
    "create_sparse_dense_matmul_rhs",
    "dense",
    "dense_from_triplets",
    "embedding_slice",
    "embedding_update_add",
    "estimate",
    "fully_connected_dense_grad_w_serial_splits",
    "fully_connected_forward",
    "fully_connected_grad_a",
    "fully_connected_grad_w",
    "machine",
    "machine_profiles",
    "make_plan",
    "mask_from_triplets",
    "matmul_plan",
    "plan",
    "plan_report",
    "plan_text",
    "predict",
    "sparse_dense_matmul",
    "tensor_ops",
    "tile_memory",
    "triplets_from_dense",
]

_register_backend(
    "popsparse", Target, _TileMachine, {n: _partial(Target.named, n) for n in _PRESETS}, compile
)
