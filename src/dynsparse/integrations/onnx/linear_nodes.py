"""Which nodes of a graph are linear layers, and which initializer is their matrix."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from dynsparse.integrations.onnx.library import library

__all__ = ["LinearNode", "join_linears", "linear_weights"]


@dataclass(frozen=True)
class LinearNode:
    """A MatMul or Gemm with a constant matrix.

    Attributes:
        node: the `NodeProto`.
        weight: the initializer's name.
        transposed: whether the initializer is [in, out] instead of [out, in].
        turn: the Transpose between the initializer and the node, if there is one.
    """

    node: Any
    weight: str
    transposed: bool
    turn: Any | None


def linear_weights(graph: Any) -> dict[str, LinearNode]:
    """Initializer -> the first linear node that takes it, in the order of the graph."""
    found: dict[str, LinearNode] = {}
    for one in _linear_nodes(graph):
        found.setdefault(one.weight, one)
    return found


def join_linears(model: Any) -> dict[str, LinearNode]:
    """Make every linear node, with the Transpose before it and the Add after it, one Gemm.

    In place; for a converter that knows linear layers by Gemm, whose first argument here may have
    more than two dimensions, which ONNX itself does not allow.

    Returns:
        Name of the node -> the node as it was found.
    """
    helper = library("onnx").helper
    graph = model.graph
    constants = {entry.name: entry for entry in graph.initializer}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    names: dict[str, LinearNode] = {}
    gone: list[Any] = []
    taken: Counter[str] = Counter()
    for one in _linear_nodes(graph):
        node = one.node
        if node.op_type == "MatMul":
            node.op_type = "Gemm"
            add = _add_after(graph, node.output[0], uses, constants)
            if add is not None:
                node.input.append(next(name for name in add.input if name != node.output[0]))
                node.output[0] = add.output[0]
                gone.append(add)
        node.input[1] = one.weight
        others = [attribute for attribute in node.attribute if attribute.name != "transB"]
        del node.attribute[:]
        node.attribute.extend([*others, helper.make_attribute("transB", int(not one.transposed))])
        base = one.weight.removesuffix(".weight")
        taken[base] += 1
        node.name = base if taken[base] == 1 else f"{base}.{taken[base]}"
        names[node.name] = one
    for node in gone:
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for node in [n for n in graph.node if n.op_type == "Transpose" and n.input[0] in constants]:
        if node.output[0] not in used and node.output[0] not in {v.name for v in graph.output}:
            graph.node.remove(node)
    return names


def _linear_nodes(graph: Any) -> list[LinearNode]:
    matrices = {entry.name for entry in graph.initializer if len(entry.dims) == 2}
    matrices |= {e.values.name for e in graph.sparse_initializer if len(e.dims) == 2}
    turned = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "Transpose"
        and node.input[0] in matrices
        and list(_attribute(node, "perm", [1, 0])) == [1, 0]
    }
    found = []
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.domain:
            continue
        matrix = node.input[1]
        turn = turned.get(matrix)
        weight = matrix if turn is None else turn.input[0]
        if weight not in matrices or _attribute(node, "transA", 0):
            continue
        as_stored = node.op_type == "MatMul" or not _attribute(node, "transB", 0)
        found.append(LinearNode(node, weight, as_stored == (turn is None), turn))
    return found


def _add_after(graph: Any, value: str, uses: Counter[str], constants: dict[str, Any]) -> Any | None:
    """The Add of a constant vector that alone takes `value`."""
    if uses[value] != 1:
        return None
    for node in graph.node:
        if value in node.input:
            other = [name for name in node.input if name != value]
            if node.op_type == "Add" and len(other) == 1 and other[0] in constants:
                return node if len(constants[other[0]].dims) == 1 else None
    return None


def _attribute(node: Any, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return library("onnx").helper.get_attribute_value(attribute)
    return default
