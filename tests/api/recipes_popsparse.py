"""Right calls of the sparse products on the tile machine."""

from __future__ import annotations

import numpy as np
import torch
from recipes import Recipe
from recipes_core import call, of

import dynsparse as ds
from dynsparse import popsparse
from dynsparse.machine import Graph, Sequence, Target

OPTIONS = {"do_grad_a_pass": True, "do_grad_w_pass": True}


def target():
    return Target.mk2(tiles=4)


def pattern():
    return ds.SparsePattern.random((16, 16), 0.25, generator=torch.Generator().manual_seed(0))


def values():
    return torch.ones(pattern().nnz)


def sparsity():
    return popsparse.SparsityParams(1)


def params():
    return popsparse.FullyConnectedParams.create_with_nz_ratio(sparsity(), 0.25, 4, 1, 16, 16)


def matmul_params():
    return popsparse.MatmulParams.create_with_nz_ratio(sparsity(), 0.25, 1, 16, 16, 4)


def plan():
    return popsparse.make_plan(target(), "float32", params(), OPTIONS)


def partitioner():
    return popsparse.Partitioner(plan())


def encoded():
    return partitioner().encode(pattern(), values())


def layer():
    made = popsparse.Layer(plan())
    made.set_weights(pattern(), values().numpy())
    return made


def on_tiles(function, **arguments):
    """An operation on tensors: of one [4, 4] graph."""

    def make():
        made = graph()
        named = {"graph": made, "program": Sequence(), "name": "a"}
        for name, find in arguments.items():
            named[name] = find(made.add_variable("float", [4, 4], name, 0))
        return named

    return Recipe(function, make)


def table():
    made = popsparse.EmbeddingLayer(plan(), 3)
    made.set_weights(pattern(), values().numpy())
    return made


def updating():
    """A layer whose pattern is updated on the machine."""
    made = popsparse.Layer(plan(), passes=(), update={"optimizer_slots": 1})
    made.set_weights(pattern(), values().numpy())
    return made


def graph():
    return Graph(target())


def connected():
    """What a pass takes: a graph with weights, input and gradient, and an empty program."""
    made = graph()
    weights = popsparse.create_fully_connected_weights(made, "float32", params(), OPTIONS)
    x = made.add_variable("float", [4, 16], "x", tiles=0)
    return {
        "graph": made,
        "weights": weights,
        "tensor": x,
        "params": params(),
        "program": Sequence(),
        "options": OPTIONS,
    }


def one_pass(function, name):
    def make():
        made = connected()
        made[name] = made.pop("tensor")
        return made

    return Recipe(function, make)


def grad_w():
    made = connected()
    x = made.pop("tensor")
    y = made["graph"].add_variable("float", [4, 16], "y", tiles=0)
    return made | {"gradients": y, "activations": x}


def embedded():
    made = connected()
    del made["tensor"]
    indices = popsparse.create_indices_tensor(made["graph"], params(), 3)
    return made | {"indices": indices}


def updated():
    made = embedded()
    slices = made["graph"].add_variable("float", [3, 16], "slices", tiles=0)
    return made | {"slices": slices, "scale": 1.0}


def multiplied():
    made = graph()
    return {
        "graph": made,
        "lhs": popsparse.create_sparse_dense_matmul_lhs(made, "float32", matmul_params()),
        "rhs": popsparse.create_sparse_dense_matmul_rhs(made, "float32", matmul_params()),
        "program": Sequence(),
        "transpose_lhs": False,
        "transpose_rhs": False,
        "options": None,
    }


def created(kind):
    return call(
        kind,
        graph=graph,
        dtype=lambda: "float32",
        params=matmul_params if "matmul" in kind.__name__ else params,
        options=lambda: OPTIONS,
        cache=popsparse.PlanningCache,
        name=lambda: "a",
    )


def planned(kind, made):
    return call(
        kind,
        target=target,
        dtype=lambda: "float32",
        params=made,
        options=lambda: OPTIONS,
        cache=popsparse.PlanningCache,
    )


def matrix(kind, columns, rows, values=None):
    return Recipe(
        lambda **named: kind(**named).blocks(),
        lambda: {
            "nz_values": np.ones(2) if values is None else values,
            "column_indices": columns,
            "row_indices": rows,
            "shape": (2, 2),
            "block_dimensions": (1, 1),
        },
    )


MATRICES = {
    "dynsparse.popsparse.COOMatrix": matrix(popsparse.COOMatrix, [0, 1], [0, 1]),
    "dynsparse.popsparse.CSRMatrix": matrix(popsparse.CSRMatrix, [0, 1], [0, 1, 2]),
    "dynsparse.popsparse.CSCMatrix": matrix(popsparse.CSCMatrix, [0, 1, 2], [0, 1]),
    "dynsparse.popsparse.BSRMatrix": matrix(
        popsparse.BSRMatrix, [0, 1], [0, 1, 2], np.ones((2, 1, 1))
    ),
}

RECIPES = MATRICES | {
    "dynsparse.popsparse.SparsityParams": call(
        popsparse.SparsityParams, block_dimensions=lambda: (4, 4)
    ),
    "dynsparse.popsparse.FullyConnectedParams": call(
        popsparse.FullyConnectedParams,
        sparsity_params=sparsity,
        nz_ratio=lambda: 0.2,
        batch_size=lambda: 4,
        num_groups=lambda: 1,
        input_channels_per_group=lambda: 16,
        output_channels_per_group=lambda: 16,
    ),
    "dynsparse.popsparse.FullyConnectedParams.create_with_num_non_zero_values": call(
        popsparse.FullyConnectedParams.create_with_num_non_zero_values,
        sparsity_params=sparsity,
        num_non_zero_elements=lambda: 10,
        batch_size=lambda: 4,
        num_groups=lambda: 1,
        input_channels_per_group=lambda: 16,
        output_channels_per_group=lambda: 16,
    ),
    "dynsparse.popsparse.MatmulParams": call(
        popsparse.MatmulParams,
        sparsity_params=sparsity,
        nz_ratio=lambda: 0.2,
        groups=lambda: 1,
        m=lambda: 16,
        k=lambda: 16,
        n=lambda: 4,
    ),
    "dynsparse.popsparse.Options": call(
        popsparse.Options,
        available_memory_proportion=lambda: 0.6,
        meta_info_bucket_oversize_proportion=lambda: 0.3,
        do_grad_a_pass=lambda: True,
        do_grad_w_pass=lambda: True,
        partials_type=lambda: "float32",
        shared_buckets=lambda: True,
        optimise_for_speed=lambda: True,
        force_bucket_spills=lambda: False,
    ),
    "dynsparse.popsparse.Options.parse": call(popsparse.Options.parse, value=lambda: OPTIONS),
    "dynsparse.popsparse.PlanConstraints": call(
        popsparse.PlanConstraints,
        x=lambda: 2,
        y=lambda: 1,
        z=lambda: 1,
        grad_w_exchange_buckets=lambda: True,
        use_dense=lambda: False,
    ),
    "dynsparse.popsparse.PlanConstraints.parse": call(
        popsparse.PlanConstraints.parse, value=lambda: {"partition": {"x": 2}}
    ),
    "dynsparse.popsparse.PlanningCache": call(popsparse.PlanningCache),
    "dynsparse.popsparse.make_plan": planned(popsparse.make_plan, params),
    "dynsparse.popsparse.matmul_plan": planned(popsparse.matmul_plan, matmul_params),
    "dynsparse.popsparse.plan": call(
        popsparse.plan,
        out=lambda: 16,
        in_=lambda: 16,
        batch=lambda: 4,
        density=lambda: 0.25,
        block_size=lambda: 1,
        dtype=lambda: "float32",
        target=target,
        passes=lambda: ("forward",),
        options=lambda: {"available_memory_proportion": 0.5},
        cache=popsparse.PlanningCache,
    ),
    "dynsparse.popsparse.dense.plan": call(
        popsparse.dense.plan,
        m=lambda: 16,
        k=lambda: 16,
        n=lambda: 4,
        dtype=lambda: "float16",
        target=target,
    ),
    "dynsparse.popsparse.plan_report": call(popsparse.plan_report, plan=plan),
    "dynsparse.popsparse.plan_text": call(popsparse.plan_text, plan=plan, runners_up=lambda: 3),
    "dynsparse.popsparse.tile_memory": call(popsparse.tile_memory, plan=plan),
    "dynsparse.popsparse.predict": call(popsparse.predict, plan=plan, pattern=pattern),
    "dynsparse.popsparse.Partitioner": call(
        popsparse.Partitioner,
        plan=plan,
        groups=lambda: 1,
        oversize=lambda: 0.3,
        optimise_for_speed=lambda: True,
        force_bucket_spills=lambda: False,
        use_actual_worker_split_costs=lambda: False,
    ),
    "dynsparse.popsparse.Partitioner.for_params": planned(popsparse.Partitioner.for_params, params),
    "dynsparse.popsparse.Partitioner.encode": of(
        partitioner, "encode", pattern=pattern, values=values
    ),
    "dynsparse.popsparse.Partitioner.decode": of(
        partitioner,
        "decode",
        meta_info=lambda: encoded().meta_info,
        nz_values=lambda: encoded().nz_values,
    ),
    "dynsparse.popsparse.Layer": call(
        popsparse.Layer,
        plan=plan,
        passes=lambda: ["forward"],
        update=lambda: {"pooling": "sum"},
        numerics=lambda: True,
        check_memory=lambda: True,
    ),
    "dynsparse.popsparse.Layer.set_pattern": of(layer, "set_pattern", pattern=pattern),
    "dynsparse.popsparse.Layer.set_values": of(layer, "set_values", values=values),
    "dynsparse.popsparse.Layer.run": of(layer, "run", name=lambda: "forward"),
    "dynsparse.popsparse.Layer.forward": of(
        layer, "forward", inputs=lambda: np.ones((4, 16), np.float32)
    ),
    "dynsparse.popsparse.EmbeddingLayer": call(
        popsparse.EmbeddingLayer, plan=plan, num_indices=lambda: 3
    ),
    "dynsparse.popsparse.EmbeddingLayer.slice": of(table, "slice", indices=lambda: [0, 3, 15]),
    "dynsparse.popsparse.EmbeddingLayer.gradient": of(
        table,
        "gradient",
        indices=lambda: [0, 3, 15],
        rows=lambda: np.ones((3, 16), np.float32),
    ),
    "dynsparse.popsparse.Layer.scores": of(
        updating,
        "scores",
        gradient=lambda: np.ones((4, 16), np.float32),
        inputs=lambda: np.ones((4, 16), np.float32),
    ),
    "dynsparse.popsparse.Layer.rewire": of(
        updating,
        "rewire",
        pattern=pattern,
        values=values,
        optimizer_slots=lambda: [values()],
    ),
    "dynsparse.popsparse.Update": call(
        popsparse.Update,
        pooling=lambda: "AVG",
        optimizer_slots=lambda: 2,
        available_memory_proportion=lambda: 0.2,
        partials_type=lambda: "float32",
    ),
    "dynsparse.popsparse.tensor_ops.elementwise": on_tiles(
        popsparse.tensor_ops.elementwise,
        operation=lambda _: "add",
        operands=lambda tensor: [tensor, 2.0],
        out=lambda tensor: tensor,
    ),
    "dynsparse.popsparse.tensor_ops.reduce": on_tiles(
        popsparse.tensor_ops.reduce,
        tensor=lambda tensor: tensor,
        axis=lambda _: [0],
        operation=lambda _: "max",
    ),
    "dynsparse.popsparse.tensor_ops.matmul": on_tiles(
        popsparse.tensor_ops.matmul,
        a=lambda tensor: tensor,
        b=lambda tensor: tensor,
        partials=lambda _: "float32",
        available_memory_proportion=lambda _: 0.5,
    ),
    "dynsparse.popsparse.tensor_ops.softmax": on_tiles(
        popsparse.tensor_ops.softmax, tensor=lambda tensor: tensor
    ),
    "dynsparse.popsparse.machine_profiles": call(
        popsparse.machine_profiles, layer=lambda: ds.nn.SparseLinear(16, 16)
    ),
    "dynsparse.popsparse.create_fully_connected_input": created(
        popsparse.create_fully_connected_input
    ),
    "dynsparse.popsparse.create_fully_connected_weights": created(
        popsparse.create_fully_connected_weights
    ),
    "dynsparse.popsparse.create_sparse_dense_matmul_lhs": created(
        popsparse.create_sparse_dense_matmul_lhs
    ),
    "dynsparse.popsparse.create_sparse_dense_matmul_rhs": created(
        popsparse.create_sparse_dense_matmul_rhs
    ),
    "dynsparse.popsparse.create_indices_tensor": call(
        popsparse.create_indices_tensor,
        graph=graph,
        params=params,
        num_indices=lambda: 3,
        name=lambda: "i",
    ),
    "dynsparse.popsparse.create_slice_tensor": call(
        popsparse.create_slice_tensor,
        graph=graph,
        dtype=lambda: "float32",
        params=params,
        num_indices=lambda: 3,
        options=lambda: OPTIONS,
        cache=popsparse.PlanningCache,
        name=lambda: "s",
    ),
    "dynsparse.popsparse.embedding_slice": Recipe(popsparse.embedding_slice, embedded),
    "dynsparse.popsparse.embedding_update_add": Recipe(popsparse.embedding_update_add, updated),
    "dynsparse.popsparse.fully_connected_dense_grad_w_serial_splits": call(
        popsparse.fully_connected_dense_grad_w_serial_splits,
        graph=graph,
        dtype=lambda: "float32",
        params=params,
        options=lambda: OPTIONS,
    ),
    "dynsparse.popsparse.fully_connected_forward": one_pass(
        popsparse.fully_connected_forward, "activations"
    ),
    "dynsparse.popsparse.fully_connected_grad_a": one_pass(
        popsparse.fully_connected_grad_a, "gradients"
    ),
    "dynsparse.popsparse.fully_connected_grad_w": Recipe(popsparse.fully_connected_grad_w, grad_w),
    "dynsparse.popsparse.sparse_dense_matmul": Recipe(popsparse.sparse_dense_matmul, multiplied),
    "dynsparse.popsparse.DensePartitioner": call(
        popsparse.DensePartitioner,
        plan=lambda: popsparse.make_plan(
            target(), "float32", params(), {"plan_constraints": {"use_dense": True}}
        ),
    ),
}
