"""Valid calls of sparse products on the tile machine: plans, buckets, layers."""

from __future__ import annotations

import numpy as np
import torch
from recipes import Recipe, call, of

import dynsparse as ds
import popsparse
from popsparse.machine import Target

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


def table():
    made = popsparse.EmbeddingLayer(plan(), 3)
    made.set_weights(pattern(), values().numpy())
    return made


def updating():
    """Make a layer whose pattern is updated on the machine."""
    made = popsparse.Layer(plan(), passes=(), update={"optimizer_slots": 1})
    made.set_weights(pattern(), values().numpy())
    return made


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
    "popsparse.COOMatrix": matrix(popsparse.COOMatrix, [0, 1], [0, 1]),
    "popsparse.CSRMatrix": matrix(popsparse.CSRMatrix, [0, 1], [0, 1, 2]),
    "popsparse.CSCMatrix": matrix(popsparse.CSCMatrix, [0, 1, 2], [0, 1]),
}


def triplets():
    return popsparse.Triplets([0, 1], [1, 0], np.ones(2, np.float32))


def fc_layer():
    return popsparse.SparseFcLayer.from_triplets(4, [2, 4], *triplets())


def of_triplets(function, **more):
    arguments = {name: lambda part=part: part for name, part in triplets()._asdict().items()}
    return call(function, **arguments, **more)


RECIPES = MATRICES | {
    "popsparse.SparsityParams": call(popsparse.SparsityParams, block_dimensions=lambda: (4, 4)),
    "popsparse.FullyConnectedParams": call(
        popsparse.FullyConnectedParams,
        sparsity_params=sparsity,
        nz_ratio=lambda: 0.2,
        batch_size=lambda: 4,
        num_groups=lambda: 1,
        input_channels_per_group=lambda: 16,
        output_channels_per_group=lambda: 16,
    ),
    "popsparse.FullyConnectedParams.create_with_num_non_zero_values": call(
        popsparse.FullyConnectedParams.create_with_num_non_zero_values,
        sparsity_params=sparsity,
        num_non_zero_elements=lambda: 10,
        batch_size=lambda: 4,
        num_groups=lambda: 1,
        input_channels_per_group=lambda: 16,
        output_channels_per_group=lambda: 16,
    ),
    "popsparse.MatmulParams": call(
        popsparse.MatmulParams,
        sparsity_params=sparsity,
        nz_ratio=lambda: 0.2,
        groups=lambda: 1,
        m=lambda: 16,
        k=lambda: 16,
        n=lambda: 4,
    ),
    "popsparse.Options": call(
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
    "popsparse.Options.parse": call(popsparse.Options.parse, value=lambda: OPTIONS),
    "popsparse.PlanConstraints": call(
        popsparse.PlanConstraints,
        x=lambda: 2,
        y=lambda: 1,
        z=lambda: 1,
        grad_w_exchange_buckets=lambda: True,
        use_dense=lambda: False,
    ),
    "popsparse.PlanConstraints.parse": call(
        popsparse.PlanConstraints.parse, value=lambda: {"partition": {"x": 2}}
    ),
    "popsparse.PlanningCache": call(popsparse.PlanningCache),
    "popsparse.make_plan": planned(popsparse.make_plan, params),
    "popsparse.matmul_plan": planned(popsparse.matmul_plan, matmul_params),
    "popsparse.plan": call(
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
    "popsparse.dense.plan": call(
        popsparse.dense.plan,
        m=lambda: 16,
        k=lambda: 16,
        n=lambda: 4,
        dtype=lambda: "float16",
        target=target,
    ),
    "popsparse.plan_report": call(popsparse.plan_report, plan=plan),
    "popsparse.plan_text": call(popsparse.plan_text, plan=plan, runners_up=lambda: 3),
    "popsparse.tile_memory": call(popsparse.tile_memory, plan=plan),
    "popsparse.predict": call(popsparse.predict, plan=plan, pattern=pattern),
    "popsparse.Partitioner": call(
        popsparse.Partitioner,
        plan=plan,
        options=lambda: {"force_bucket_spills": False},
    ),
    "popsparse.Partitioner.for_params": planned(popsparse.Partitioner.for_params, params),
    "popsparse.Partitioner.encode": of(partitioner, "encode", pattern=pattern, values=values),
    "popsparse.Partitioner.decode": of(
        partitioner,
        "decode",
        meta_info=lambda: encoded().meta_info,
        nz_values=lambda: encoded().nz_values,
    ),
    "popsparse.Layer": call(
        popsparse.Layer,
        plan=plan,
        passes=lambda: ["forward"],
        update=lambda: {"pooling": "sum"},
        numerics=lambda: True,
        check_memory=lambda: True,
    ),
    "popsparse.Layer.set_pattern": of(layer, "set_pattern", pattern=pattern),
    "popsparse.Layer.set_values": of(layer, "set_values", values=values),
    "popsparse.Layer.run": of(layer, "run", name=lambda: "forward"),
    "popsparse.Layer.forward": of(layer, "forward", inputs=lambda: np.ones((4, 16), np.float32)),
    "popsparse.EmbeddingLayer": call(popsparse.EmbeddingLayer, plan=plan, num_indices=lambda: 3),
    "popsparse.EmbeddingLayer.slice": of(table, "slice", indices=lambda: [0, 3, 15]),
    "popsparse.EmbeddingLayer.gradient": of(
        table,
        "gradient",
        indices=lambda: [0, 3, 15],
        rows=lambda: np.ones((3, 16), np.float32),
    ),
    "popsparse.Layer.scores": of(
        updating,
        "scores",
        gradient=lambda: np.ones((4, 16), np.float32),
        inputs=lambda: np.ones((4, 16), np.float32),
    ),
    "popsparse.Layer.rewire": of(
        updating,
        "rewire",
        pattern=pattern,
        values=values,
        optimizer_slots=lambda: [values()],
    ),
    "popsparse.Update": call(
        popsparse.Update,
        pooling=lambda: "AVG",
        optimizer_slots=lambda: 2,
        available_memory_proportion=lambda: 0.2,
        partials_type=lambda: "float32",
    ),
    "popsparse.compile": call(
        popsparse.compile,
        model=lambda: torch.nn.Linear(4, 4),
        optimizer=lambda: torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=0.1),
        loss=lambda: torch.nn.functional.mse_loss,
        target=target,
        loss_scale=lambda: 2.0,
        device_iterations=lambda: 2,
        pipeline=lambda: "grouped",
        gradient_accumulation=lambda: 2,
        options=lambda: {"partials_type": "float32"},
    ),
    "popsparse.machine_profiles": call(
        popsparse.machine_profiles, layer=lambda: ds.nn.SparseLinear(16, 16, target=target())
    ),
    "popsparse.DensePartitioner": call(
        popsparse.DensePartitioner,
        plan=lambda: popsparse.make_plan(
            target(), "float32", params(), {"plan_constraints": {"use_dense": True}}
        ),
    ),
    "popsparse.SparseFcLayer": of_triplets(
        popsparse.SparseFcLayer.from_triplets,
        hidden_size=lambda: 4,
        input_shape=lambda: [2, 4],
        matmul_options=lambda: {"doGradAPass": "true"},
        dtype=lambda: torch.float32,
        use_bias=lambda: True,
        relu=lambda: True,
        target=target,
    ),
    "popsparse.SparseFcLayer.from_random_generator": call(
        popsparse.SparseFcLayer.from_random_generator,
        hidden_size=lambda: 4,
        input_shape=lambda: [2, 4],
        density=lambda: 0.5,
        block_size=lambda: 1,
        values_initialiser_gen=lambda: np.random.default_rng(0).normal,
        indices_initialiser_gen=lambda: np.random.default_rng(0),
    ),
    "popsparse.SparseFcLayer.update_triplets": of(fc_layer, "update_triplets", triplets=triplets),
    "popsparse.dense_from_triplets": of_triplets(
        popsparse.dense_from_triplets, shape=lambda: (4, 4)
    ),
    "popsparse.mask_from_triplets": of_triplets(popsparse.mask_from_triplets, shape=lambda: (4, 4)),
    "popsparse.triplets_from_dense": call(
        popsparse.triplets_from_dense, matrix=lambda: np.eye(4), block_size=lambda: 2
    ),
}
