"""Lowering of a traced step to a program of the tile machine.

Consecutive element-wise operators of one shape run as one step, whose vertices evaluate torch's own
operators on their tile's data. Views move no data: torch's operator is applied to the addresses of
the elements. Products, sums and sparse layers use the machine's programs. Any other operator raises
an error with its name.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from popsparse.compiled.pipeline import Pipeline, Place
from popsparse.machine import FLOAT, Copy, DType, Graph, Tensor, as_dtype
from popsparse.machine import Sequence as Steps
from popsparse.planning import dense as planner
from popsparse.programs.dense import Layout, add_product, create_operand
from popsparse.programs.dense_weights import operations
from popsparse.programs.layout import PlannedTensor, SparseTensor, keep_layout
from popsparse.tensor_ops import Spread, map_elements, reduce

Node = Any
"""An `fx.Node`, whose arguments may be anything."""

_VIEWS = {
    "as_strided", "cat", "constant_pad_nd", "expand", "flip", "permute", "repeat", "select",
    "slice", "squeeze", "stack", "unfold", "unsqueeze", "view",
}  # fmt: skip
_SPARSE_BACKWARD = torch.ops.dynsparse.linear_backward.default
_SUMS = {"sum": "add", "amax": "max", "amin": "min"}
# These take one or more instructions for each element; the others one for each vector.
_FUNCTIONS = {
    "acos", "asin", "atan", "atan2", "cos", "digamma", "div", "elu", "erf", "erfc", "exp", "exp2",
    "expm1", "gelu", "gelu_backward", "lgamma", "log", "log10", "log1p", "log2", "logit", "mish",
    "pow", "reciprocal", "rsqrt", "sigmoid", "silu", "silu_backward", "sin", "sinh", "softplus",
    "sqrt", "tan", "tanh", "addcdiv",
}  # fmt: skip
_NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}


def name_of(node: Node) -> str:
    """The operator's name, such as "mm"."""
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def is_random(node: Node) -> bool:
    """Whether the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_dropout(node: Node) -> bool:
    """Whether the operator draws zeros and ones with one probability, as dropout does."""
    return node.target is torch.ops.aten.bernoulli.p


def narrow(dtype: torch.dtype) -> torch.dtype:
    """The type with 32 bits in place of 64; other types are returned unchanged."""
    return _NARROW.get(dtype, dtype)


def type_of(value: torch.Tensor) -> Any:
    """The machine's type for a torch tensor; 64 bits become 32."""
    return as_dtype(narrow(value.dtype))


def _is_elementwise(node: Node) -> bool:
    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    name = name_of(node)
    return torch.Tag.pointwise in tags or is_dropout(node) or name in ("_to_copy", "copy")


class Backward(NamedTuple):
    """Tensors of a sparse layer's backward pass that an update uses: dY [batch, out],
    x [batch, in], and dW, laid out like the values."""

    gradient: Tensor
    inputs: Tensor
    grad_weight: Tensor


class Lowering:
    """Adds the steps of a traced step to a program.

    Args:
        graph: the machine's graph.
        module: the traced step.
        values: the tensors of placeholders that have one.
        layers: weights of sparse layers, by the placeholder of their values.
        in_buckets: placeholders of values of sparse layers, and of tensors laid out like them.
        partials: the type of partial sums of dense products.
        program: the program to which steps are added.
        pipeline: provides a program for each node, in place of `program`.

    Attributes:
        backwards: `Backward` by placeholder of the values of a sparse layer.
    """

    def __init__(
        self,
        graph: Graph,
        module: fx.GraphModule,
        values: dict[Node, Any],
        layers: Mapping[Node, SparseTensor],
        in_buckets: set[Node],
        partials: DType,
        program: Steps,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.graph, self.module, self.layers = graph, module, layers
        self.values: dict[Node, Any] = values
        self.program, self._in_buckets, self.partials = program, in_buckets, partials
        self.backwards: dict[Node, Backward] = {}
        self._pipeline = pipeline
        self._places: Mapping[Node, Place] = {} if pipeline is None else pipeline.places
        self._place: Place | None = None
        self._groups = _group(module.graph, self._places)
        self._constants: dict[Any, Tensor] = {}

    def lower(self, outputs: Mapping[Node, list[Tensor]]) -> None:
        """Add all steps; `outputs` maps nodes to the variables that take their values."""
        self.outputs = outputs
        for node in self.module.graph.nodes:
            if node.op in ("call_function", "get_attr") and node not in self._groups:
                self.value(node)
        copies: dict[Steps, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for node, variables in outputs.items():
            with self._at_place_of(node):
                value = self.tensor(node)
                pairs = [(value, variable) for variable in variables if variable is not value]
                copies[self.program] += pairs
        for program, pairs in copies.items():
            if pairs:
                program.add(Copy(pairs, name="new values"))

    @contextmanager
    def _at_place_of(self, node: Node) -> Iterator[None]:
        """Add steps at the place of a node."""
        place = self._places.get(node)
        if place is None or self._pipeline is None:
            yield
            return
        before = self._place, self.graph, self.program
        self._place, self.graph = place, self._pipeline.graph_of(node)
        self.program = self._pipeline.programs[place]
        try:
            yield
        finally:
            self._place, self.graph, self.program = before

    def value(self, node: Node) -> Any:
        """The result of a node: a tensor of the machine, a torch constant, or several."""
        if node not in self.values:
            with self._at_place_of(node):
                if node in self._groups:
                    self._lower_group(self._groups[node])
                else:
                    self.values[node] = self._lower(node)
        value = self.values[node]
        if self._pipeline is None or not isinstance(value, Tensor):
            return value
        return self._pipeline.bring(node, value, self._place)

    def tensor(self, node: Node) -> Tensor:
        """The result of a node, on the machine."""
        value = self.value(node)
        if isinstance(value, Tensor):
            return value
        try:
            return self._constant(value)
        except ValueError as error:
            raise ValueError(
                f"the constant {node.name!r} of the model does not fit the machine: {error}"
            ) from error

    def _constant(self, value: torch.Tensor) -> Tensor:
        """A constant on the machine; a uniform one is a single element."""
        dtype = type_of(value)
        is_uniform = value.numel() == 1 or not any(value.stride())
        held = value.reshape(-1)[:1] if is_uniform else value
        key = (self.graph, dtype, held.item()) if is_uniform else (self.graph, id(value))
        if key not in self._constants:
            tensor = self.graph.add_constant(dtype, list(held.shape), held.numpy())
            self.graph.map_linearly(tensor)
            self._constants[key] = tensor
        constant = self._constants[key]
        if not is_uniform:
            return constant
        return constant.reshape(*[1] * value.ndim).broadcast_to(*value.shape)

    def _name(self, node: Node, operation: str) -> str:
        scope = node.meta.get("custom") or {"phase": "", "module": ""}
        return " ".join(part for part in (scope["phase"], scope["module"], operation) if part)

    def _steps(self, node: Node, operation: str) -> Steps:
        """The steps of an operation, for the profile."""
        steps = Steps(name=self._name(node, operation))
        self.program.add(steps)
        return steps

    # Operators outside groups.

    def _lower(self, node: Node) -> Any:
        if node.op == "get_attr":
            return getattr(self.module, str(node.target))
        if node.target is operator.getitem:
            source, number = node.args
            if source.target is _SPARSE_BACKWARD and number == 1:
                self._in_buckets.add(node)
            return self.value(source)[number]
        name = name_of(node)
        sources = [self.value(source) for source in node.all_input_nodes]
        if not is_random(node) and not any(isinstance(s, (Tensor, tuple)) for s in sources):
            return self._fold(node)
        if node.target is torch.ops.dynsparse.linear.default:
            return self._sparse_forward(node)
        if node.target is _SPARSE_BACKWARD:
            return self._sparse_backward(node)
        # Tensors in buckets have gaps, and an order other than that of the values.
        is_in_order = not self._in_buckets.intersection(node.all_input_nodes)
        if name in _SUMS and (is_in_order or (name == "sum" and node.meta["val"].numel() == 1)):
            return self._reduce(node, name)
        if name in _VIEWS and is_in_order:
            return self._view(node)
        if name in ("mm", "bmm") and is_in_order:
            return self._multiply(node)
        raise NotImplementedError(
            f"{node.target} of {self._name(node, name)!r} has no program on the tile machine"
        )

    def _fold(self, node: Node) -> Any:
        """Compute a node that depends on constants only."""
        if name_of(node) == "full":
            return torch.tensor(node.args[1], dtype=node.meta["val"].dtype).expand(node.args[0])
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        return node.target(*args, **kwargs)

    def _view(self, node: Node) -> Tensor:
        """A view, by torch's operator applied to the addresses of the elements."""
        first = self.tensor(node.all_input_nodes[0])
        kwargs = dict(node.kwargs)
        args = list(node.args)
        if name_of(node) == "constant_pad_nd":
            fill = args.pop() if len(args) > 2 else 0.0
            filler = torch.tensor(fill, dtype=node.meta["val"].dtype)
            args.append(int(self._constant(filler).addresses().reshape(-1)[0]))
        args = fx.map_arg(args, lambda n: torch.from_numpy(self.tensor(n).addresses()))
        if name_of(node) == "view":  # of addresses that may not be contiguous
            addresses = args[0].reshape(args[1]).numpy()
        else:
            addresses = node.target(*args, **kwargs).numpy()
        view = Tensor(self.graph, first.dtype, addresses.shape, addresses=addresses)
        # A reshape of all elements in order: products can still use the layout.
        same = first.numel == view.numel and isinstance(first, PlannedTensor)
        if same and np.array_equal(first.addresses().reshape(-1), addresses.reshape(-1)):
            return keep_layout(first, view)
        return view

    def _reduce(self, node: Node, name: str) -> Tensor:
        source, dims, keep = [*node.args, False, False][:3]
        tensor = self.tensor(source)
        is_full = not dims or source in self._in_buckets
        axes = list(range(tensor.ndim)) if is_full else list(dims)
        if not axes:
            return tensor
        result = reduce(
            self.graph,
            tensor,
            axes,
            self._steps(node, name),
            operation=_SUMS[name],
            dtype=type_of(node.meta["val"]),
            name=name,
        )
        return result.reshape(*node.meta["val"].shape) if keep else result

    def _factor(self, node: Node) -> tuple[Tensor, bool]:
        """An operand of a product as [groups, rows, columns], and whether it is transposed."""
        is_transposed = False
        while name_of(node) == "permute" and node.args[1] in ([1, 0], [0, 2, 1]):
            node, is_transposed = node.args[0], not is_transposed
        tensor = self.tensor(node)
        if tensor.ndim == 2:
            tensor = keep_layout(tensor, tensor.expand_dims(0))
        return tensor, is_transposed

    def _multiply(self, node: Node) -> Tensor:
        """A matrix product [m, k] [k, n], or a batch of them."""
        (a, a_is_transposed), (b, b_is_transposed) = map(self._factor, node.args)
        groups, rows, columns = a.shape
        m, k = (columns, rows) if a_is_transposed else (rows, columns)
        n = b.shape[1 if b_is_transposed else 2]
        name, transposed = self._name(node, name_of(node)), (a_is_transposed, b_is_transposed)
        layouts = plan_groups(self.graph, groups, m, k, n, a.dtype, self.partials)
        results = []
        for first, layout in layouts:
            part = slice(first, first + layout.groups)
            factors = (a, b) if layout.groups == groups else (a[part], b[part])
            results.append(
                add_product(self.graph, layout, *factors, self.program, name, transposed=transposed)
            )
        shape = node.meta["val"].shape
        if len(results) == 1:
            return keep_layout(results[0], results[0].reshape(*shape))
        addresses = np.concatenate([result.addresses() for result in results])
        return Tensor(self.graph, results[0].dtype, shape, addresses=addresses)

    def _rows(self, node: Any) -> Tensor:
        """An operand [..., channels] as [batch, channels]."""
        tensor = self.tensor(node)
        return keep_layout(tensor, tensor.reshape(-1, tensor.shape[-1]))

    def _sparse_forward(self, node: Node) -> Tensor:
        x, values = node.args[:2]
        weights = self.layers[values]
        steps = self._steps(node, "linear")
        build = operations(weights.plan)
        result = build.add_product(self.graph, weights, self._rows(x), steps, "forward")
        return keep_layout(result, result.reshape(*node.meta["val"].shape))

    def _sparse_backward(self, node: Node) -> tuple[Any, Any]:
        dy, x, values = node.args[:3]
        weights = self.layers[values]
        build = operations(weights.plan)
        gradient = self._rows(dy)
        steps = self._steps(node, "linear")
        dx = dw = None
        if node.args[-1]:
            dx = build.add_product(self.graph, weights, gradient, steps, "grad_input")
            dx = keep_layout(dx, dx.reshape(*node.meta["val"][0].shape))
        if x is not None:
            inputs = self._rows(x)
            dw = build.add_grad_weight(self.graph, weights, gradient, inputs, steps)
            self.backwards[values] = Backward(gradient, inputs, dw)
        return dx, dw

    # Groups of element-wise operators.

    def _lower_group(self, group: list[Node]) -> None:
        members = set(group)
        sources = [s for node in group for s in node.all_input_nodes if s not in members]
        values = {source: self.value(source) for source in dict.fromkeys(sources)}
        constants = {
            source: value.reshape(-1)[:1].reshape(())
            for source, value in values.items()
            if isinstance(value, torch.Tensor) and (value.numel() == 1 or not any(value.stride()))
        }
        leaves = {s: self.tensor(s) for s in values if s not in constants}
        if not leaves and not any(map(is_dropout, group)):
            for node in group:
                self.values[node] = self._fold(node)
            return
        results = [n for n in group if n in self.outputs or any(u not in members for u in n.users)]
        taken: list[Any] = []
        for node in results:
            variable = self._variable_to_update(node, members)
            taken.append(type_of(node.meta["val"]) if variable is None else variable)
        # Values of sparse layers are in buckets: their shape on the machine is different.
        shape = tuple(group[-1].meta["val"].shape)
        held = self._in_buckets.intersection(leaves)
        if held:
            self._in_buckets.update(group)
            shape = leaves[held.pop()].shape
        like = self._layout(shape, [r for r in taken if isinstance(r, Tensor)], leaves)
        order = Spread.of(self.graph, like).order
        compute = _evaluate(group, list(leaves), constants, results, order)
        names = [name_of(node) for node in group]
        functions = sum(name in _FUNCTIONS for name in names)
        what = "+".join(dict.fromkeys(n.strip("_") for n in names))
        what = what if len(what) < 40 else f"{what[:37]}..."
        made = map_elements(
            self.graph,
            what,
            list(leaves.values()),
            taken,
            compute,
            self._steps(group[-1], what),
            like=like,
            vector_operations=len(names) - functions,
            functions=functions,
        )
        self.values |= dict(zip(results, made, strict=True))

    def _variable_to_update(self, node: Node, group: set[Node]) -> Tensor | None:
        """The variable to update in place, if nothing reads the old value any more."""
        if node not in self.outputs:
            return None
        variable = self.outputs[node][0]
        waiting = [old for old, held in self.values.items() if held is variable]
        while waiting:
            for user in waiting.pop().users:
                if user in group:
                    continue
                if user not in self.values:  # the step's output among them
                    return None
                if name_of(user) in _VIEWS:
                    waiting.append(user)
        return variable

    def _layout(
        self, shape: tuple[int, ...], taken: list[Tensor], leaves: Mapping[Node, Tensor]
    ) -> Tensor:
        """A tensor with the layout for the results of a group."""
        if taken:
            return taken[0]
        full = [leaf for leaf in leaves.values() if leaf.shape == shape]
        if full:

            def fullest(leaf: Tensor) -> tuple[int, bool]:
                held = np.bincount(self.graph.tiles_of(leaf).reshape(-1))
                return int(held.max()), not isinstance(leaf, PlannedTensor)

            return min(full, key=fullest)
        variable = self.graph.add_variable(FLOAT, list(shape), "layout")
        self.graph.map_linearly(variable, grain=2)
        return variable


def plan_groups(
    graph: Graph, groups: int, m: int, k: int, n: int, dtype: DType, partials: DType
) -> list[tuple[int, Layout]]:
    """Plan one product for each group over the tiles: those of a part run at once.

    Their partial sums have the type `partials`, or the data's if that is wider.

    Returns the first group of each part, and its layout.
    """
    tiles = graph.target.tiles
    most = min(groups, tiles)
    parts = []
    for first in range(0, groups, most):
        count = min(most, groups - first)
        target = graph.target
        if count > 1:
            target = target.with_(tiles=tiles // count, processors=1)
        sums = max(dtype, partials, key=lambda kind: kind.size).name
        planned = planner.plan(m, k, n, dtype.name, target, partials=sums)
        parts.append((first, Layout(planned, count)))
    return parts


def place_weight(
    graph: Graph, node: Node, dtype: DType, partials: DType, name: str
) -> Tensor | None:
    """Create a parameter in the layout of the first product that reads it as a matrix."""
    readers = [(user, node, False) for user in node.users]
    for reader, operand, is_transposed in readers:  # grows during the loop
        operation = name_of(reader)
        if operation == "mm":
            a, b = (arg.meta["val"].shape for arg in reader.args)
            ((_, layout),) = plan_groups(graph, 1, a[0], a[1], b[1], dtype, partials)
            which = "a" if reader.args[0] is operand else "b"
            weight = create_operand(graph, layout, which, name, transposed=is_transposed)
            return keep_layout(weight, weight.reshape(*node.meta["val"].shape))
        transposes = operation == "permute" and reader.args[1] == [1, 0]
        if transposes or (operation == "view" and not is_transposed):
            readers += [(user, reader, is_transposed != transposes) for user in reader.users]
    return None


def _group(graph: fx.Graph, places: Mapping[Node, Place]) -> dict[Node, list[Node]]:
    """The groups of element-wise operators that run as one step, by member, in order.

    Operators of one shape and place that use each other's results join, unless a path between them
    passes through another operator: `level` counts such paths.
    """
    level: dict[Node, int] = {}
    groups: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        near = []
        level[node] = 0
        for source in node.all_input_nodes:
            joins = (
                source in groups
                and _is_elementwise(node)
                and source.meta["val"].shape == node.meta["val"].shape
                and places.get(source) == places.get(node)
            )
            near += [source] if joins else []
            level[node] = max(level[node], level[source] + (not joins))
        if not _is_elementwise(node):
            continue
        group = [node]
        for source in near:
            if level[source] == level[node] and groups[source] is not group:
                group = sorted([*groups[source], *group])
                for member in group:
                    groups[member] = group
        groups[node] = group
    # A group that only later steps need, such as random numbers, joins the first of them.
    first_to_last = sorted({id(group): group for group in groups.values()}.values())
    for group in reversed(first_to_last):
        members = set(group)
        users = sorted(
            (u for n in group for u in n.users if u not in members), key=level.__getitem__
        )
        goal = groups.get(users[0]) if users else None
        if (
            goal is not None
            and level[users[0]] > level[group[0]]
            and places.get(goal[0]) == places.get(group[0])
            and goal[-1].meta["val"].shape == group[-1].meta["val"].shape
            and all(u in goal or level[u] >= level[users[0]] for u in users)
        ):
            joined = sorted([*goal, *group])
            for member in joined:
                groups[member] = joined
    return groups


def _evaluate(
    group: list[Node],
    leaves: list[Node],
    constants: Mapping[Node, torch.Tensor],
    results: list[Node],
    order: np.ndarray | None,
) -> Callable[..., list[np.ndarray]]:
    """A function that evaluates a group on arrays of its leaves, all in the order of tiles.

    With stochastic rounding the arrays of float16 leaves, and all results, are float32.
    """
    half = torch.float16
    halves = [leaf.meta["val"].dtype == half for leaf in leaves]
    members = set(group)
    casts = {n for n in group if name_of(n) == "_to_copy" and n.meta["val"].dtype == half}
    # The edges that take the results also round them.
    last_casts = {node for node in casts if not members.intersection(node.users)}

    def compute(*arrays: np.ndarray) -> list[np.ndarray]:
        values: dict[Node, Any] = dict(constants)
        for leaf, array in zip(leaves, arrays, strict=True):
            values[leaf] = torch.from_numpy(np.array(array))
        is_wide = any(
            is_half and array.dtype == np.float32
            for is_half, array in zip(halves, arrays, strict=True)
        )
        left_out = casts if is_wide else last_casts
        for node in group:
            if node in left_out:
                values[node] = values[node.args[0]]
                continue
            if is_dropout(node):
                # The machine uses torch's generator: the same numbers that the model draws on the
                # host, in the order of host memory.
                like = node.meta["val"]
                drawn = torch.empty_strided(like.shape, node.meta["strides"], dtype=like.dtype)
                drawn = drawn.bernoulli_(node.args[1]).reshape(-1)
                drawn = drawn.float() if is_wide else drawn
                values[node] = drawn if order is None else drawn[torch.from_numpy(order)]
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
        return [values[node].numpy() for node in results]

    return compute
