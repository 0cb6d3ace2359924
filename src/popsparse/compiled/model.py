"""`popsparse.compile`: a model that trains on the tile machine, with each step as one program."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from dynsparse._core.checks import check_types
from dynsparse.nn import SparseLinear
from dynsparse.training import SparseTrainer
from dynsparse.training.drop import MagnitudeGradient
from dynsparse.training.history import LastStep
from popsparse.compiled.lower import Backward, Lowering, narrow, place_weight, type_of
from popsparse.compiled.pipeline import Key, Pipeline, StageProfile, StepOptions
from popsparse.machine import FLOAT, Copy, Engine, Graph, Profile, Program, Repeat, Target
from popsparse.machine import Sequence as Steps
from popsparse.machine import Tensor as Variable
from popsparse.planning.options import Update
from popsparse.planning.search import plan
from popsparse.programs.dense_weights import operations
from popsparse.programs.layout import SparseTensor
from popsparse.programs.update import UpdatePrograms
from popsparse.tensor_ops import Spread
from popsparse.torch_layer import TargetOptions, TileMachine, use_executors


class _SparseWeights(NamedTuple):
    """A sparse layer, its weights on the machine, and the programs of its updates.

    `tensors` are the values and the optimizer state laid out like them, by key.
    """

    name: str
    layer: SparseLinear
    weights: SparseTensor
    tensors: dict[Key, Variable]
    backward: Backward | None
    update: UpdatePrograms | None


class _ScoresExecutor:
    """The executor of a layer while its pattern is updated, which returns the given scores."""

    def __init__(self, target: Target, scores: Callable[[], np.ndarray]) -> None:
        self.target, self._scores = target, scores

    def scores(self, layer: Any, pairs: Any, pooling: str) -> Tensor:
        return torch.from_numpy(self._scores()[0])

    def kernel(self, batch: int, backward: bool) -> str:
        return "tile machine"

    def for_pattern(self, pattern: Any) -> _ScoresExecutor:
        return self


class CompiledModel:
    """A model that trains on the tile machine; made by `compile`.

    Weights, buffers and the optimizer's state are on the machine from the first step on;
    `copy_weights_to_host` writes them into the model and the optimizer.

    Attributes:
        model, target: as given; `optimizer`: torch's; `trainer`: the sparse trainer, or None.
        profiles: profiles of the last run of each program by name: "step", "rates" (new learning
            rates), and "scores <layer>" and "rewire <layer>" of a pattern update.
        engine: the machine's engine; None before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | SparseTrainer,
        loss: Callable[[Any, Tensor], Tensor],
        target: Target,
        how: StepOptions,
        options: TargetOptions,
    ) -> None:
        self.model, self.loss, self.target = model, loss, target
        self.trainer = optimizer if isinstance(optimizer, SparseTrainer) else None
        self.optimizer = optimizer.optimizer if isinstance(optimizer, SparseTrainer) else optimizer
        self._how, self.options = how, options
        self._pipeline: Pipeline | None = None
        self.profiles: dict[str, Profile] = {}
        self.engine: Engine | None = None
        self._layers: list[_SparseWeights] = []
        self._patterns: dict[str, Any] = {}

    # Building.

    def _check(self, data: Sequence[Tensor]) -> None:
        """Check that a program of the machine can run the model.

        Raises:
            TypeError: data types other than float32 and float16. ValueError: a trainer or a layer
                that computes on the host in every step.
        """
        for tensor in (*self.model.parameters(), *self.model.buffers(), *data):
            if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32):
                raise TypeError(f"the tile machine has float16 and float32, got {tensor.dtype}")
        for layer in self.model.modules():
            executor = getattr(layer, "executor", None)
            if executor is not None and not isinstance(executor, TileMachine):
                raise ValueError(
                    f"{type(layer).__name__} is computed by {type(executor).__name__}, which has "
                    "no program on the tile machine"
                )
        trainer = self.trainer
        kind: Any = type(trainer)
        if trainer is not None and (
            not isinstance(trainer.history, LastStep)
            or isinstance(trainer.drop_score, MagnitudeGradient)
            or kind._before_step is not SparseTrainer._before_step
            or kind._after_step is not SparseTrainer._after_step
        ):
            raise ValueError(
                f"{kind.__name__} looks at gradients or weights on the host: take a trainer such "
                "as RigL or SET"
            )

    def _build(self, inputs: Sequence[Tensor], target: Tensor) -> None:
        self._check((*inputs, target))
        from popsparse.compiled.trace import trace  # slow to import

        how = self._how
        step = trace(self.model, self.optimizer, self.loss, inputs, target, how)
        if self.trainer is not None:
            for pairs in self.trainer._captures.values():
                pairs.clear()  # from the traced run
        self._constant_settings = _constant_settings(self.optimizer)
        self._shapes = [tuple(tensor.shape) for tensor in (*inputs, target)]
        graph = Graph(self.target, how.replicas)
        pipeline = None
        if how.is_split:
            pipeline = Pipeline(graph, step, how.pipeline, how.gradient_accumulation)
        self._pipeline = pipeline

        def graph_of(node: fx.Node) -> Graph:
            return graph if pipeline is None else pipeline.graph_of(node)

        layers = {
            step.inputs["parameter", f"{name}.values" if name else "values"]: (name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, SparseLinear)
        }
        product = torch.ops.dynsparse.linear.default
        weights = {
            node: self._create_weights(graph_of(node), node, name, layer)
            for node, (name, layer) in layers.items()
            if any(user.target is product for user in node.users)
        }
        self._layers.clear()
        self._variables: dict[Key, Variable] = {}
        values: dict[fx.Node, Any] = {}
        for key, node in step.inputs.items():
            values[node] = self._variables[key] = self._create(graph_of(node), key, node, weights)
        loss = graph_of(step.outputs["loss",]).add_variable(FLOAT, [], "loss", tiles=0)
        results: dict[Key, Variable] = {("loss",): loss}
        self._output_shape = []
        if how.return_output:
            value = step.outputs["output",].meta["val"]
            output = graph.add_variable(type_of(value), list(value.shape), "output")
            graph.map_linearly(output, grain=2)
            results["output",], self._output_shape = output, [*value.shape]
        outputs: dict[fx.Node, list[Variable]] = {}
        for key, node in step.outputs.items():
            variable = results[key] if key in results else self._variables[key]
            outputs.setdefault(node, []).append(variable)
        parameters = {key[1] for key, node in step.inputs.items() if node in weights}
        in_buckets = {
            node
            for key, node in step.inputs.items()
            if key[0] in ("parameter", "state", "sum") and key[1] in parameters
        }
        self._data = [key for key in step.inputs if key[0] in ("input", "target")]
        loads = [(key, self._stream(graph, key)) for key in self._data]
        body = Steps(*(load for _, load in loads))
        partials = self.options.planned.partials_type
        lowering = Lowering(
            graph, step.module, values, weights, in_buckets, partials, body, pipeline
        )
        lowering.lower(outputs)
        to_host = []
        for (name,), variable in results.items():
            stream = graph.add_stream(name, variable.dtype, variable.numel, to_device=False)
            to_host.append(Copy(variable, stream, name=f"{name} to host"))
        if pipeline is None:
            for copy in to_host:
                body.add(copy)
        else:
            sums = [(key, total) for key, total in self._variables.items() if key[0] == "sum"]
            body = pipeline.build(sums, loads, to_host[0])
        programs: dict[str, Program] = {"step": Repeat(how.device_iterations, body)}
        rates = [key for key in step.inputs if key[0] == "rate"]
        programs["rates"] = Steps(*(self._stream(graph, key) for key in rates))
        for node, (name, layer) in layers.items():
            if node in weights:
                self._add_layer(
                    graph_of(node),
                    name,
                    layer,
                    weights[node],
                    lowering.backwards.get(node),
                    programs,
                )
        self.engine = Engine(graph, programs, stochastic_rounding=how.stochastic_rounding)
        for sparse in self._layers:
            if sparse.update is not None:
                sparse.update.connect(self.engine)
        self._rates: list[float] = []
        self.copy_weights_to_device()

    def _create_weights(
        self, graph: Graph, node: Any, name: str, layer: SparseLinear
    ) -> SparseTensor:
        """Create the weights of a sparse layer, planned for the passes in the step."""
        products = [u for u in node.users if u.target is torch.ops.dynsparse.linear.default]
        backwards = [
            u for u in node.users if u.target is torch.ops.dynsparse.linear_backward.default
        ]
        batches = {u.args[0].meta["val"].numel() // layer.in_features for u in products}
        if len(batches) != 1:
            raise ValueError(
                f"layer {name!r} is used with {len(batches)} batch sizes, expected one"
            )
        passes = ["forward"]
        passes += ["grad_input"] * any(u.args[-1] for u in backwards)
        passes += ["grad_weight"] * any(u.args[1] is not None for u in backwards)
        executor = layer.executor
        options = executor.options if isinstance(executor, TileMachine) else self.options
        pattern = layer.pattern
        planned = plan(
            *pattern.shape,
            batches.pop(),
            pattern.density,
            pattern.block_size,
            str(layer.values.dtype).removeprefix("torch."),
            graph.target,
            passes=passes,
            options=options.planned,
        )
        return operations(planned).create_weights(graph, planned, f"{name} weights")

    def _create(
        self,
        graph: Graph,
        key: Key,
        node: fx.Node,
        weights: Mapping[fx.Node, SparseTensor],
    ) -> Variable:
        """Create the variable of a tensor of the step, in the layout of its first reader."""
        if node in weights:
            return weights[node].nz_values
        value, name = node.meta["val"], " ".join(key)
        dtype = type_of(value)
        beside = key[0] in ("state", "sum") and ("parameter", key[1]) in self._variables
        if beside and value.ndim:
            like = self._variables["parameter", key[1]]
            return Spread.of(graph, like).create_like(graph, dtype, name, like)
        if key[0] == "parameter":
            partials = self.options.planned.partials_type
            placed = place_weight(graph, node, dtype, partials, name)
            if placed is not None:
                return placed
        variable = graph.add_variable(dtype, list(value.shape), name)
        graph.map_linearly(variable, grain=2)
        return variable

    def _stream(self, graph: Graph, key: Key) -> Copy:
        """Create the stream of a variable from the host, and the copy from it."""
        name, variable = " ".join(key), self._variables[key]
        stream = graph.add_stream(name, variable.dtype, variable.numel, to_device=True)
        return Copy(stream, variable, name=f"{name} from host")

    def _add_layer(
        self,
        graph: Graph,
        name: str,
        layer: SparseLinear,
        weights: SparseTensor,
        backward: Backward | None,
        programs: dict[str, Program],
    ) -> None:
        """Add a sparse layer, and the programs that update its pattern, if a trainer does."""
        parameter = f"{name}.values" if name else "values"
        tensors = {
            key: variable
            for key, variable in self._variables.items()
            if key[:2] in (("parameter", parameter), ("state", parameter))
        }
        update = None
        trainer = self.trainer
        if trainer is not None and trainer.schedule is not None and backward is not None:
            pooling = getattr(trainer.growth, "pooling", None)
            how = dict(self.options.dense_grad)
            update = UpdatePrograms(
                graph,
                weights,
                backward.gradient if trainer._needs_gradients else None,
                backward.inputs,
                Update.parse(how | ({} if pooling is None else {"pooling": pooling})),
                list(tensors.values())[1:],
                name,
            )
            scores, rewire = update.programs["scores"], update.programs["rewire"]
            programs.update({f"scores {name}": scores, f"rewire {name}": rewire})
        self._layers.append(_SparseWeights(name, layer, weights, tensors, backward, update))

    # Weights.

    def _host_tensors(self) -> Iterator[tuple[Key, Tensor]]:
        """The tensors of model and optimizer that the machine holds."""
        from popsparse.compiled.trace import optimizer_state

        for name, parameter in self.model.named_parameters():
            yield ("parameter", name), parameter.detach()
        for name, buffer in self.model.named_buffers():
            yield ("buffer", name), buffer
        yield from optimizer_state(self.model, self.optimizer).items()

    def copy_weights_to_device(self) -> None:
        """Copy weights, buffers, patterns and the optimizer's state to the machine."""
        by_key = {key: sparse for sparse in self._layers for key in sparse.tensors}
        engine = self._require_engine()
        for sparse in self._layers:
            self._encode(sparse, sparse.layer.values.detach())
            engine.write(sparse.weights.meta_info, self._patterns[sparse.name].meta_info)
        for key, tensor in self._host_tensors():
            if key in by_key:
                values = self._encode(by_key[key], tensor)
                engine.write(self._variables[key], values)
            elif key in self._variables:
                engine.write(self._variables[key], _array(tensor))

    def _encode(self, sparse: _SparseWeights, values: Tensor) -> Any:
        """Encode values of a sparse layer for the machine, and keep the encoding of its pattern."""
        partitioner = operations(sparse.weights.plan).partitioner(sparse.weights.plan)
        encoded = partitioner.encode(sparse.layer.pattern, values.contiguous())
        self._patterns[sparse.name] = encoded.pattern
        return encoded.nz_values

    def _require_engine(self) -> Engine:
        """The engine; raises RuntimeError before the first step."""
        if self.engine is None:
            raise RuntimeError("take a step first: the program is built for its batch")
        return self.engine

    @torch.no_grad()
    def copy_weights_to_host(self) -> None:
        """Write weights, buffers and the optimizer's state into the model and the optimizer.

        Raises:
            RuntimeError: before the first step.
        """
        self._require_engine()
        parameters = dict(self.model.named_parameters())
        for key, tensor in self._host_tensors():
            if key not in self._variables:
                continue
            array = self._read(key)
            values = torch.from_numpy(array).to(tensor.dtype).reshape(tensor.shape)
            if key[0] != "state":
                tensor.copy_(values)
                continue
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            for parameter in trained if key[1] == "step" else [parameters[key[1]]]:
                self.optimizer.state[parameter][key[-1]] = values.clone()

    def _read(self, key: Key) -> np.ndarray:
        array = self._require_engine().read(self._variables[key])
        for sparse in self._layers:
            if key in sparse.tensors:
                return self._patterns[sparse.name].gather(array)
        return array

    # Steps.

    @check_types
    def step(self, *data: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Train on a batch.

        Args:
            data: the model's inputs, then the target of the loss. With
                `device_iterations` x `replicas` x `gradient_accumulation` = n > 1 they have a
                leading dimension n, for n batches in this order.

        Returns:
            The loss, or the losses [n]; with `return_output` also the model's output, or the
            outputs [n, ...].

        Raises:
            TypeError: at the first step, data types other than float16 and float32.
            ValueError: at the first step, a trainer or a layer that computes on the host in every
                step; a shape other than that of the first batch; an optimizer setting other than
                the learning rate has changed; a pattern update falls inside the device iterations.
            NotImplementedError: an operator of the model that has no program (named in the
                message).
        """
        how = self._how
        count = how.device_iterations * how.batches
        if count > 1 and any(not t.ndim or len(t) != count for t in data):
            raise ValueError(f"expected tensors of {count} batches, [{count}, ...]")
        batches = [tensor if count > 1 else tensor.unsqueeze(0) for tensor in data]
        if self.engine is None:
            first = [batch[0] for batch in batches]
            self._build(first[:-1], first[-1])
        engine = self._require_engine()
        shapes = [tuple(batch.shape[1:]) for batch in batches]
        if shapes != self._shapes:
            raise ValueError(f"the program is for batches of {self._shapes}, got {shapes}")
        if _constant_settings(self.optimizer) != self._constant_settings:
            raise ValueError(
                "settings of the optimizer other than lr are constants of the program: compile "
                "again"
            )
        due = self._is_update_due()
        self._send_rates()
        # Replicas take turns on a stream.
        by_replica = (-1, how.replicas, how.gradient_accumulation)
        by_turn = (-1, how.gradient_accumulation, how.replicas)
        for key, batch in zip(self._data, batches, strict=True):
            rows = _array(batch).reshape(*by_replica, math.prod(batch.shape[1:]))
            engine.connect(" ".join(key), rows.swapaxes(1, 2).reshape(count, -1))
        losses = np.zeros((count, 1), np.float32)
        engine.connect("loss", losses)
        output: np.ndarray | None = None
        if how.return_output:
            kind = engine.graph.streams["output"].dtype.numpy
            output = np.zeros((count, math.prod(self._output_shape)), kind)
            engine.connect("output", output)
        self.profiles["step"] = engine.run("step")
        if self.trainer is not None:
            self._advance_trainer(self.trainer, due)
        result = torch.from_numpy(losses.reshape(by_turn).swapaxes(1, 2).reshape(-1))
        result = result if count > 1 else result[0]
        if output is None:
            return result
        outer = [count] if count > 1 else []
        return result, torch.from_numpy(output).reshape(outer + self._output_shape)

    def figures(self) -> dict[str, dict[str, float]]:
        """The cost of the last run of each program, by the names of `profiles`: cycles, seconds,
        tflops, max_tile_bytes, to_host_bytes, from_host_bytes."""
        return {
            name: {
                "cycles": profile.cycles,
                "seconds": profile.seconds,
                "tflops": sum(step.flops for step in profile.steps) / profile.seconds / 1e12,
                "max_tile_bytes": int(profile.memory.max_tile_bytes),
                "to_host_bytes": profile.to_host_bytes,
                "from_host_bytes": profile.from_host_bytes,
            }
            for name, profile in self.profiles.items()
        }

    def operations(self) -> dict[str, dict[str, float]]:
        """The cost of each operation of the last step, by its phase, module and operators: cycles,
        and of them "compute", "exchange", "sync" and "host"; "received_bytes" over the exchange by
        all tiles; "flops", floating-point operations. The costliest come first.

        Raises:
            RuntimeError: before the first step.
        """
        self._require_engine()
        by_name: dict[str, dict[str, float]] = {}
        for step in self.profiles["step"].steps:
            if step.runs:
                path = [part for part in step.name.split("/") if not part.startswith("stage ")]
                operation = by_name.setdefault(path[1], defaultdict(float))
                parts = {
                    "cycles": step.cycles,
                    **step.parts,
                    "received_bytes": step.received,
                    "flops": step.flops,
                }
                for part, amount in parts.items():
                    operation[part] += amount
        costliest = sorted(by_name, key=lambda name: -by_name[name]["cycles"])
        return {name: dict(by_name[name]) for name in costliest}

    def stages(self) -> list[StageProfile]:
        """The cost of each pipeline stage in the last step, and its memory.

        Raises:
            RuntimeError: before the first step. ValueError: a model without a pipeline.
        """
        self._require_engine()
        if self._pipeline is None or self._how.pipeline is None:
            raise ValueError("the model has no stages: compile it with pipeline=")
        return self._pipeline.profile(self.profiles["step"])

    def _send_rates(self) -> None:
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        if rates != self._rates:
            engine = self._require_engine()
            for number, rate in enumerate(rates):
                engine.connect(f"rate {number}", np.array([rate], np.float32))
            self.profiles["rates"] = engine.run("rates")
            self._rates = rates

    # Updates of patterns.

    def _is_update_due(self) -> bool:
        """Whether these steps end with a pattern update."""
        trainer = self.trainer
        if trainer is None:
            return False
        iterations = self._how.device_iterations
        due = [trainer._is_due(trainer.steps + 1 + i) for i in range(iterations)]
        if any(due[:-1]):
            raise ValueError(
                f"an update of the pattern comes inside {iterations} device iterations: make "
                "update_interval a multiple of them"
            )
        return due[-1]

    def _advance_trainer(self, trainer: SparseTrainer, due: bool) -> None:
        """Count the steps, and update the patterns if due."""
        for _ in range(self._how.device_iterations - due):
            trainer.before_optimizer_step()
            trainer.after_optimizer_step()
        if not due:
            return
        engine = self._require_engine()
        self.copy_weights_to_host()
        for sparse in self._layers:
            if sparse.update is None or sparse.backward is None:
                continue
            self.profiles[f"scores {sparse.name}"] = engine.run(f"scores {sparse.name}")
            pairs = trainer._captures.get(sparse.name)
            if pairs is not None:
                parts = (sparse.backward.inputs, sparse.backward.gradient)
                x, dy = (torch.from_numpy(engine.read(part)) for part in parts)
                pairs[:] = [(x, dy)]
                gradient = self._patterns[sparse.name].gather(
                    engine.read(sparse.backward.grad_weight)
                )
                sparse.layer.values.grad = torch.from_numpy(gradient)
        before = {sparse.name: sparse.layer.pattern for sparse in self._layers}
        scored = [
            (sparse.layer, _ScoresExecutor(self.target, sparse.update.scores))
            for sparse in self._layers
            if sparse.update is not None
        ]
        with use_executors(scored):
            trainer.before_optimizer_step()
            trainer.after_optimizer_step()
        host = dict(self._host_tensors())
        for sparse in self._layers:
            sparse.layer.values.grad = None
            if sparse.update is not None and sparse.layer.pattern is not before[sparse.name]:
                # Send the new pattern, its values and their optimizer state.
                arrays = [self._encode(sparse, host[key]) for key in sparse.tensors]
                sparse.update.send(self._patterns[sparse.name].meta_info, arrays)
                name = f"rewire {sparse.name}"
                self.profiles[name] = engine.run(name)


def _array(tensor: Tensor) -> np.ndarray:
    """A host tensor in the machine's type; 64 bits become 32."""
    array: np.ndarray = tensor.detach().to(narrow(tensor.dtype)).numpy()
    return array


def _constant_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer settings that are constants of a program."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        for group in optimizer.param_groups
    ]


@check_types
def compile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | SparseTrainer,
    loss: Callable[[Any, Tensor], Tensor],
    target: Target,
    *,
    loss_scale: float = 1.0,
    device_iterations: int = 1,
    stochastic_rounding: int | None = None,
    clip_grad_norm: float | None = None,
    return_output: bool = False,
    pipeline: str | None = None,
    gradient_accumulation: int = 1,
    replicas: int = 1,
    options: Mapping[str, Any] | None = None,
) -> CompiledModel:
    """Compile a model so that its training steps, forward, backward and the optimizer's step, run
    on the tile machine as one program.

    The program is built at the first step, for the shape of its batch, from torch's own operators:
    the step is traced with `torch.fx`. Element-wise operators, views, sums, matrix products and
    sparse linear layers have programs; layer norm, softmax, losses and others are composed of them.

    Args:
        model: the model, trained in its current mode. Random numbers, as in dropout, are torch's:
            with the same seed they equal those of the model on the host.
        optimizer: `torch.optim.SGD`, `Adam` or `AdamW`, or a sparse trainer of one, such as RigL,
            whose pattern updates run on the machine. Learning rates may change.
        loss: called with the model's output and the target; returns a scalar.
        target: the machine.
        loss_scale: multiplies the loss for the backward pass; gradients are divided by it.
        device_iterations: number of steps of a call, in a loop on the machine.
        stochastic_rounding: a seed: float16 results are rounded up or down at random, see `Engine`,
            so that small steps of float16 weights are not lost. None rounds to nearest.
        clip_grad_norm: scales all gradients down to at most this total norm, as in
            `torch.nn.utils.clip_grad_norm_`. Not with a pipeline.
        return_output: whether steps also return the model's output, a tensor. Not with a pipeline,
            micro-batches or replicas.
        pipeline: splits the model where a block on another processor begins, see
            `poptorch.BeginBlock`: "grouped", "interleaved" or "sequential". None spreads the whole
            model over all processors.
        gradient_accumulation: number of micro-batches of a step; the optimizer uses their mean
            gradient. A trainer that grows by gradients uses those of the last one.
        replicas: number of copies of the model, a power of two, each on its share of the
            processors. The optimizer uses their mean gradient. Buffers, as in batch norm, and the
            gradients for growth are those of the first replica.
        options: options of the sparse products, by name, as in `target_options` of `SparseLinear`;
            "partials_type" also applies to dense products.

    Raises:
        TypeError: another optimizer. ValueError: numbers out of range, an unknown option, replicas
            that cannot share the processors evenly. `CompiledModel.step` raises further errors.
    """
    how = StepOptions(
        loss_scale=loss_scale,
        device_iterations=device_iterations,
        stochastic_rounding=stochastic_rounding,
        clip_grad_norm=clip_grad_norm,
        return_output=return_output,
        pipeline=pipeline,
        gradient_accumulation=gradient_accumulation,
        replicas=replicas,
    )
    stepped = optimizer.optimizer if isinstance(optimizer, SparseTrainer) else optimizer
    if type(stepped) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise TypeError(
            "optimizer must be SGD, Adam or AdamW, or a sparse trainer of one of them, got "
            f"{type(stepped).__name__}"
        )
    target.share(replicas)  # raises if they cannot share the processors
    return CompiledModel(model, optimizer, loss, target, how, TargetOptions.parse(options))
