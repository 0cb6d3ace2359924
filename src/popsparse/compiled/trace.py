"""One training step of a model as a graph of torch's own operators.

The step is run once under `make_fx`, with its backward pass and the optimizer's step, so that every
formula is torch's. A second pass removes in-place writes and replaces unsupported operators by
supported ones (`decompositions.TABLE`).
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._autograd import _get_sequence_nr
from torch.func import functional_call, functionalize
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree

from dynsparse.nn import SparseLinear
from popsparse.compiled.blocks import block_of, tracers
from popsparse.compiled.decompositions import TABLE, WRITING
from popsparse.compiled.lower import is_dropout, is_random, name_of
from popsparse.compiled.pipeline import Key, Step, StepOptions
from popsparse.torch_layer import use_executors

# Operators that do not change values, and those around an optimizer's step.
_IDENTITIES = {"detach", "alias", "clone", "lift_fresh", "lift_fresh_copy", "detach_"}
_STEP = "step"


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> Any:
    """The `step` of its class, without the hooks that a trainer adds."""
    step: Any = type(optimizer).step
    return step.__wrapped__


def _copy_without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy without state and parameters."""
    new = copy.copy(optimizer)
    new.state, new.param_groups = defaultdict(dict), []
    return new


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Key, Tensor]:
    """The tensors of the optimizer's state; missing ones have the values of a first step.

    "step", which is the same for all parameters, is one tensor.

    Raises:
        ValueError: step counts that differ; the momentum of an optimizer with dampening, which
            starts with a gradient.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p in names]
    tensors: dict[Key, Tensor] = {}
    fresh = _copy_without_state(optimizer)
    copies: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        if group.get("dampening") and any(not optimizer.state.get(p) for p in group["params"]):
            raise ValueError("dampening: take the first step with torch")
        params = [p.detach().clone() for p in group["params"]]
        copies |= dict(zip(group["params"], params, strict=True))
        fresh.param_groups.append({**group, "params": params, "weight_decay": 0})
        for p in params:
            p.grad = torch.zeros_like(p)
    _step_without_hooks(optimizer)(fresh)
    counts = set()
    for parameter in trained:
        state = optimizer.state.get(parameter) or {
            key: torch.zeros_like(value) if key == _STEP else value
            for key, value in fresh.state[copies[parameter]].items()
        }
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if key == _STEP:
                counts.add(float(value))
                tensors["state", _STEP] = value
            else:
                tensors["state", names[parameter], key] = value
    if len(counts) > 1:
        raise ValueError(f"expected parameters with equal step counts, got {sorted(counts)}")
    return {key: value.detach() for key, value in tensors.items()}


def _take_step(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, Tensor],
    originals: dict[str, nn.Parameter],
    gradients: dict[str, Tensor],
    values: dict[Key, Tensor],
) -> dict[Key, Tensor]:
    """The optimizer's step on tensors: new parameters and state."""
    stepped = _copy_without_state(optimizer)
    params = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    by_parameter = {parameter: name for name, parameter in originals.items()}
    for number, group in enumerate(optimizer.param_groups):
        names = [by_parameter[p] for p in group["params"] if p in by_parameter]
        for name in names:
            params[name].grad = gradients.get(name)
            for key, value in values.items():
                if key[:2] in (("state", name), ("state", _STEP)):
                    stepped.state[params[name]][key[-1]] = value.clone()
        # Differentiable steps use only operators, without reading numbers on the host.
        rate = values["rate", str(number)].detach().requires_grad_()
        how = {"differentiable": True, "foreach": False, "fused": False, "capturable": False}
        known = {name: value for name, value in how.items() if name in group}
        stepped.param_groups.append(
            {**group, **known, "lr": rate, "params": [params[name] for name in names]}
        )
    _step_without_hooks(optimizer)(stepped)
    after: dict[Key, Tensor] = {("parameter", name): params[name].detach() for name in gradients}
    for name in gradients:
        for key, value in stepped.state[params[name]].items():
            if isinstance(value, Tensor):
                state_key = ("state", _STEP) if key == _STEP else ("state", name, key)
                after[state_key] = value.detach()
    return after


def _clip(gradients: dict[str, Tensor], most: float) -> dict[str, Tensor]:
    """Scale gradients to a total norm of at most `most`, as `torch.nn.utils.clip_grad_norm_`."""
    total = torch.stack([g.float().square().sum() for g in gradients.values()]).sum().sqrt()
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    return {name: gradient * factor for name, gradient in gradients.items()}


class _Scopes:
    """Names of the modules and phases of nodes, for the profile."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.begun: list[str] = []
        self.phase, self.module = "forward", ""
        self.seen: set[Any] = set()
        self.marked = 0
        self.stage = 0
        self.stages: list[tuple[int, str]] = [(0, "")]
        self.first: list[int] = []  # Autograd's sequence number when each later stage begins.

    def mark(self, module: str | None = None) -> None:
        """Assign the nodes made since the last mark to this module."""
        tracing: Any = get_proxy_mode()
        nodes = list(tracing.tracer.graph.nodes)
        for node in nodes[self.marked :]:
            name = self.module if module is None else module
            node.meta["custom"] = {"phase": self.phase, "module": name, "stage": self.stage}
        self.marked = len(nodes)

    def begin(self, name: str, processor: int | None) -> None:
        """Begin a block; one on another processor begins a stage."""
        if processor is None or processor == self.stages[-1][0]:
            self.stages[-1] = (self.stages[-1][0], name or self.stages[-1][1])
            return
        self.mark()
        self.stages.append((processor, name))
        self.first.append(_get_sequence_nr())
        self.stage += 1

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if module in self.names:
            self.mark()
            for tensor in pytree.tree_leaves(inputs):
                self.follow(getattr(tensor, "grad_fn", None), self.module)
            block = block_of(module)
            if block is not None:
                self.begin(*block)
            self.begun.append(self.module)
            self.module = self.names[module]

    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if module not in self.names:
            return
        self.mark()
        name, self.module = self.module, self.begun.pop()
        if isinstance(output, Tensor):
            self.follow(output.grad_fn, name)

    def follow(self, node: Any, name: str) -> None:
        """Assign the backward of a module's operators to the module too."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None or node in self.seen:
                continue
            self.seen.add(node)
            stage = bisect_right(self.first, node._sequence_nr())
            node.register_prehook(lambda _, name=name, stage=stage: self._switch(name, stage))
            waiting += [before for before, _ in node.next_functions]

    def _switch(self, name: str, stage: int) -> None:
        self.mark()
        self.module, self.stage = name, stage

    @contextmanager
    def install_hooks(self) -> Iterator[None]:
        """Observe the modules and blocks of the model while the context lasts."""
        handles = [
            hooks.register_module_forward_pre_hook(self.enter),
            hooks.register_module_forward_hook(self.leave),
        ]
        tracers.append(self)
        try:
            yield
        finally:
            tracers.pop()
            for handle in handles:
                handle.remove()


def trace(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Tensor], Tensor],
    inputs: Sequence[Tensor],
    target: Tensor,
    how: StepOptions,
) -> Step:
    """Trace the step of a model in its current mode, on inputs of these shapes.

    With micro-batches it is the step of the last one: its gradients are added to the sums of the
    earlier ones, and the optimizer uses their mean.
    """
    originals = {name: p for name, p in model.named_parameters() if p.requires_grad}
    held = {p for group in optimizer.param_groups for p in group["params"]}
    trained = [name for name, p in originals.items() if p in held]
    tensors: dict[Key, Tensor] = {
        **{("parameter", name): p.detach() for name, p in model.named_parameters()},
        **{("buffer", name): b for name, b in model.named_buffers()},
        **optimizer_state(model, optimizer),
        **{
            ("rate", str(i)): torch.tensor(float(group["lr"]))
            for i, group in enumerate(optimizer.param_groups)
        },
        **{("input", str(i)): x for i, x in enumerate(inputs)},
        ("target",): target,
    }
    if how.is_split:
        tensors |= {("sum", name): torch.zeros_like(originals[name]) for name in trained}
    keys: list[Key] = list(tensors)
    results: list[Key] = []
    scopes = _Scopes(model)

    def step(*flat: Tensor) -> list[Tensor]:
        values = dict(zip(keys, flat, strict=True))
        leaves = {
            key[1]: value.detach().requires_grad_(key[1] in trained)
            for key, value in values.items()
            if key[0] == "parameter"
        }
        buffers = {key[1]: value.clone() for key, value in values.items() if key[0] == "buffer"}
        data = tuple(value for key, value in values.items() if key[0] == "input")
        with scopes.install_hooks():
            output = functional_call(model, {**leaves, **buffers}, data)
        result = loss(output, values["target",])
        scopes.mark("loss")
        scopes.follow(result.grad_fn, "loss")
        scopes.phase, scopes.module = "backward", "loss"
        chosen = [leaves[name] for name in trained]
        scale = how.loss_scale / how.batches
        scaled = result * scale if scale != 1 else result
        gradients = torch.autograd.grad(scaled, chosen, allow_unused=True)
        scopes.mark()
        after: dict[Key, Tensor] = {("loss",): result.detach()}
        if how.is_split:
            scopes.phase, scopes.module = "accumulate", ""
            gradients = tuple(
                None if gradient is None else values["sum", name] + gradient
                for name, gradient in zip(trained, gradients, strict=True)
            )
            after |= {
                ("sum", name): total
                for name, total in zip(trained, gradients, strict=True)
                if total is not None
            }
            scopes.mark()
        scopes.phase, scopes.module = "update", "optimizer"
        by_name = {
            name: gradient / how.loss_scale if how.loss_scale != 1 else gradient
            for name, gradient in zip(trained, gradients, strict=True)
            if gradient is not None
        }
        if how.clip_grad_norm is not None:
            by_name = _clip(by_name, how.clip_grad_norm)
        if how.return_output:
            after["output",] = output.detach()
        after |= {("buffer", name): value for name, value in buffers.items()}
        after |= _take_step(optimizer, leaves, originals, by_name, values)
        scopes.mark()
        results[:] = after
        return list(after.values())

    flat = list(tensors.values())
    no_executors = [(m, None) for m in model.modules() if isinstance(m, SparseLinear)]
    with use_executors(no_executors), torch.random.fork_rng([]), sdpa_kernel(SDPBackend.MATH):
        traced = make_fx(step, WRITING)(*flat)

    def replay(*flat: Tensor) -> Any:
        return fx.Interpreter(traced).run(*flat)

    with torch.random.fork_rng([]), traceback.preserve_node_meta():
        module = make_fx(functionalize(replay), decomposition_table=TABLE)(*flat)
    module.graph = _simplify(module.graph)
    nodes = list(module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    before = dict(zip(keys, placeholders, strict=True))
    after = dict(zip(results, nodes[-1].args[0], strict=True))
    changed = {key: node for key, node in after.items() if before.get(key) is not node}
    return Step(module, before, changed, scopes.stages)


def _simplify(graph: fx.Graph) -> fx.Graph:
    """Remove operators that change nothing and those whose result is unused."""
    for node in list(graph.nodes):
        name = name_of(node)
        if "record_function" in name or (is_random(node) and not is_dropout(node)):
            continue
        source: Any = None
        if is_dropout(node):
            node.meta["strides"] = node.args[0].meta["val"].stride()
        if name.startswith("new_") or name.endswith("_like"):  # reads no values
            fill = node.args[-1] if "full" in name else int("ones" in name)
            value = node.meta["val"]
            node.target = torch.ops.aten.full.default
            node.args, node.kwargs = (list(value.shape), fill), {"dtype": value.dtype}
        elif name in _IDENTITIES:
            source = node.args[0]
        elif name == "copy" and node.meta["val"].shape == node.args[1].meta["val"].shape:
            source = node.args[1]
        elif name == "mul" and node.args[1] == 1:
            source = node.args[0]
        if source is not None and source.meta["val"].dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if "record_function" in str(node.target):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    # Like torch's fx_graph_cse, which imports all of inductor.
    known: dict[tuple[Any, str, str], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and not is_random(node):
            # A node's repr is its name; those of 1, 1.0 and True differ.
            first = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
    return graph
