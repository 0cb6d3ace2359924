"""Valid calls of functions that add sparse products to a graph of the tile machine."""

from __future__ import annotations

from recipes import Recipe, call
from recipes_popsparse import OPTIONS, matmul_params, params, target

import popsparse
from popsparse.machine import Graph, Sequence


def on_tiles(function, **arguments):
    """Make a recipe of an operation on [4, 4] tensors of one graph."""

    def make():
        made = graph()
        named = {"graph": made, "program": Sequence(), "name": "a"}
        for name, find in arguments.items():
            named[name] = find(made.add_variable("float", [4, 4], name, 0))
        return named

    return Recipe(function, make)


def graph():
    return Graph(target())


def connected():
    """Make the arguments of a pass: a graph with weights, input, gradient and an empty program."""
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
        "cache": popsparse.PlanningCache(),
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
        "cache": popsparse.PlanningCache(),
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


RECIPES = {
    "popsparse.tensor_ops.elementwise": on_tiles(
        popsparse.tensor_ops.elementwise,
        operation=lambda _: "add",
        operands=lambda tensor: [tensor, 2.0],
        out=lambda tensor: tensor,
    ),
    "popsparse.tensor_ops.reduce": on_tiles(
        popsparse.tensor_ops.reduce,
        tensor=lambda tensor: tensor,
        axis=lambda _: [0],
        operation=lambda _: "max",
    ),
    "popsparse.tensor_ops.matmul": on_tiles(
        popsparse.tensor_ops.matmul,
        a=lambda tensor: tensor,
        b=lambda tensor: tensor,
        partials=lambda _: "float32",
        available_memory_proportion=lambda _: 0.5,
    ),
    "popsparse.tensor_ops.softmax": on_tiles(
        popsparse.tensor_ops.softmax, tensor=lambda tensor: tensor
    ),
    "popsparse.create_fully_connected_input": created(popsparse.create_fully_connected_input),
    "popsparse.create_fully_connected_weights": created(popsparse.create_fully_connected_weights),
    "popsparse.create_sparse_dense_matmul_lhs": created(popsparse.create_sparse_dense_matmul_lhs),
    "popsparse.create_sparse_dense_matmul_rhs": created(popsparse.create_sparse_dense_matmul_rhs),
    "popsparse.create_indices_tensor": call(
        popsparse.create_indices_tensor,
        graph=graph,
        params=params,
        num_indices=lambda: 3,
        name=lambda: "i",
    ),
    "popsparse.create_slice_tensor": call(
        popsparse.create_slice_tensor,
        graph=graph,
        dtype=lambda: "float32",
        params=params,
        num_indices=lambda: 3,
        options=lambda: OPTIONS,
        cache=popsparse.PlanningCache,
        name=lambda: "s",
    ),
    "popsparse.embedding_slice": Recipe(popsparse.embedding_slice, embedded),
    "popsparse.embedding_update_add": Recipe(popsparse.embedding_update_add, updated),
    "popsparse.fully_connected_dense_grad_w_serial_splits": call(
        popsparse.fully_connected_dense_grad_w_serial_splits,
        graph=graph,
        dtype=lambda: "float32",
        params=params,
        options=lambda: OPTIONS,
        cache=popsparse.PlanningCache,
    ),
    "popsparse.fully_connected_forward": one_pass(popsparse.fully_connected_forward, "activations"),
    "popsparse.fully_connected_grad_a": one_pass(popsparse.fully_connected_grad_a, "gradients"),
    "popsparse.fully_connected_grad_w": Recipe(popsparse.fully_connected_grad_w, grad_w),
    "popsparse.sparse_dense_matmul": Recipe(popsparse.sparse_dense_matmul, multiplied),
}
