"""Wrapped models, whose calls run many steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dynsparse._core.checks import check_kind, shorten
from dynsparse.nn import SparseLinear
from dynsparse.nn.backends import make_executor
from dynsparse.training import SparseTrainer
from popsparse.poptorch.options import ConnectionType, Options, OutputMode, ReductionType
from popsparse.report import write_layer_report
from popsparse.torch_layer import use_executors


def _split_arguments(arguments: Any, count: int, meaning: str) -> list[Any]:
    """Split `arguments`, any tree of tensors with equal first dimensions, into `count` equal parts.

    Raises:
        ValueError: no tensor, tensors of different lengths, a length that `count` does not divide;
            `meaning` explains `count` in the message.
    """
    leaves, tree = pytree.tree_flatten(arguments)
    sizes = sorted({leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim})
    if not sizes:
        raise ValueError("expected a combined batch of tensors with samples, got none")
    if len(sizes) > 1:
        raise ValueError(
            f"the tensors of a combined batch must have one length, got {sizes[0]} and {sizes[1]}"
        )
    if sizes[0] == 0 or sizes[0] % count:
        raise ValueError(
            f"a combined batch must be a multiple of {meaning}, got {sizes[0]} samples: set these "
            "options, or use batches of poptorch.DataLoader"
        )
    size = sizes[0] // count
    columns = [
        leaf.split(size) if isinstance(leaf, Tensor) and leaf.ndim else (leaf,) * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten(list(row), tree) for row in zip(*columns, strict=True)]


def _synthetic_like(arguments: Any) -> Any:
    """Normally distributed numbers in place of floating-point data, zeros in place of others."""

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.randn_like(leaf) if leaf.is_floating_point() else torch.zeros_like(leaf)

    return pytree.tree_map(replace, arguments)


class _Outputs:
    """Collects the outputs that a call returns, batch by batch.

    Tensors with samples are concatenated along them, in the order of the data; a scalar becomes one
    number per returned batch, or stays a scalar if that is the only batch.
    """

    def __init__(self, options: Options, mode: OutputMode, per_iteration: int) -> None:
        self._mode = mode
        self._every = options.output_every if mode is OutputMode.EveryN else 1
        self._iterations = options.device_iterations
        self._replicas = options.replication_factor
        self._per_iteration = per_iteration
        self._seen = 0
        self._kept: list[Any] = []

    def add(self, output: Any) -> None:
        """Add the output of the next batch, detached if it is kept."""
        iteration, inside = divmod(self._seen, self._per_iteration)
        self._seen += 1
        if self._mode is OutputMode.Sum and self._kept:
            self._kept[0] = pytree.tree_map(torch.add, self._kept[0], _detach(output))
        elif self._mode is OutputMode.Final:
            # The last batch of every replica.
            share = self._per_iteration // self._replicas
            if iteration == self._iterations - 1 and inside % share == share - 1:
                self._kept.append(_detach(output))
        elif self._mode is not OutputMode.EveryN or (iteration + 1) % self._every == 0:
            self._kept.append(_detach(output))

    def result(self) -> Any:
        """The outputs that the call returns."""
        return self._kept[0] if len(self._kept) == 1 else _join(self._kept)


def _detach(output: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, output)


def _join(outputs: Sequence[Any]) -> Any:
    trees = [pytree.tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in trees), strict=True)
    return pytree.tree_unflatten([_join_column(column) for column in columns], trees[0][1])


def _join_column(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return list(column)
    return torch.cat(tuple(column)) if column[0].ndim else torch.stack(tuple(column))


_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def _use_cache(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Let torch.compile cache code in this folder; restores the environment afterwards."""
    before = os.environ.get(_CACHE)
    if folder:
        os.environ[_CACHE] = str(folder)
    try:
        yield
    finally:
        if folder:
            os.environ.pop(_CACHE)
            os.environ |= {} if before is None else {_CACHE: before}


_KEPT = (
    "compiled code stays in the folder of options.enableExecutableCaching, and "
    "dynsparse.training.save_checkpoint keeps weights, patterns and the optimizer"
)
_CYCLES = "popsparse.machine_profiles(layer) has the cycles of a sparse layer with a target"
_REPLACEMENTS = {
    **dict.fromkeys(("compileAndExport", "loadExecutable", "save"), _KEPT),
    **dict.fromkeys(("cycleCount", "getLatency", "getPerfCounters"), _CYCLES),
    "rng_state": "torch.get_rng_state() is the state of the generator",
}
"""Attributes of PopTorch's models, by name, and their replacements here."""


class WrappedModel:
    """The result of `trainingModel` and `inferenceModel`: call it with a combined batch.

    The weights are always the model's own Parameters; there is no second copy.

    Attributes:
        options: the options. model: the wrapped module.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options | None,
        optimizer: Optimizer | SparseTrainer | None,
        training: bool,
        target: Any,
        compile: bool | str,
    ) -> None:
        check_kind("model", model, nn.Module, "a torch.nn.Module")
        check_kind("options", options, (Options, type(None)), "poptorch.Options")
        if not isinstance(compile, (bool, str)):
            raise TypeError(
                "compile must be True, False or the name of a backend of torch.compile, got "
                f"{shorten(compile)}"
            )
        self.options = Options() if options is None else options
        self.model = model
        self._training = training
        self._optimizer: Any = None
        self._backend = "inductor" if compile is True else compile
        self._executors: list[tuple[SparseLinear, Any]] = []
        if target is not None:
            memory = self.options.available_memory
            self._executors, self._backend = _make_executors(model, target, memory), False
        elif self.options.available_memory is not None or self.options.profile_folder is not None:
            raise ValueError(
                "setAvailableMemoryProportion and enableProfiling are for the tile machine: also "
                "pass target=popsparse.Target.bow(), or leave them out"
            )
        if self._backend is False and self.options.cache_folder is not None:
            raise ValueError(
                "enableExecutableCaching keeps compiled code, and without compile, or with a "
                "target, nothing is compiled: leave one of them out"
            )
        self._code: Callable[..., Any] | None = None
        self._attached = self.options.connection is ConnectionType.Always
        self._data: Any = None
        if training:
            self.setOptimizer(optimizer)
        if self.options.random_seed is not None:
            torch.manual_seed(self.options.random_seed)

    def setOptimizer(self, optimizer: Optimizer | SparseTrainer | None) -> None:
        """Use another optimizer, or another sparse trainer, from the next call on.

        Raises:
            TypeError: neither an optimizer nor a sparse trainer. ValueError: an inference model.
        """
        if not self._training:
            raise ValueError("a model for inference has no optimizer")
        check_kind(
            "optimizer",
            optimizer,
            (Optimizer, SparseTrainer),
            "a torch.optim.Optimizer or a sparse trainer such as dynsparse.RigL",
        )
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        instead = f": {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else ""
        raise AttributeError(f"a PopTorch-style model has no {shorten(name)} here{instead}")

    def isAttachedToDevice(self) -> bool:
        return self._attached

    def attachToDevice(self) -> None:
        """Allow calls again.

        Raises:
            RuntimeError: connectionType is Never.
        """
        if self.options.connection is ConnectionType.Never:
            raise RuntimeError("connectionType is Never: the model can only be compiled")
        self._attached = True

    def detachFromDevice(self) -> None:
        """Release the compiled code; calls fail until `attachToDevice`."""
        self._attached = False
        self._code = None

    def copyWeightsToHost(self) -> None:
        """Does nothing: there is one copy of the weights."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for combined batches like this one; with a target, build its programs. Weights,
        buffers, gradients and random generators stay unchanged.

        Raises:
            ValueError: as a call does.
        """
        if self._backend is False and not self._executors:
            return
        parts, _ = self._split((args, kwargs))
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        devices = {p.device.index for p in parameters if p.is_cuda}
        with (
            torch.random.fork_rng(sorted(devices)),
            self._set_mode(),
            _use_cache(self._cache_folder()),
        ):
            for parameter in parameters:
                parameter.grad = None
            try:
                inputs, keywords = parts[0]
                with torch.set_grad_enabled(self._training):
                    output = self._compiled()(*inputs, **keywords)
                if self._training:
                    _loss_of(output).backward()
            finally:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _cache_folder(self) -> str | os.PathLike[str] | None:
        return self.options.cache_folder or os.environ.get("POPTORCH_CACHE_DIR")

    def _split(self, batch: Any) -> tuple[list[Any], int]:
        """The batches of a combined batch, and how many make a step."""
        options = self.options
        per_step = options.batches_per_step if self._training else options.replication_factor
        factors = {
            "deviceIterations": options.device_iterations,
            "replicationFactor": options.replication_factor,
        }
        if self._training:
            factors["Training.gradientAccumulation"] = options.Training.gradient_accumulation
        meaning = f"{' x '.join(factors)} = {' x '.join(map(str, factors.values()))}"
        return _split_arguments(batch, options.device_iterations * per_step, meaning), per_step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a combined batch, ordered by iterations, replicas, accumulated batches.

        Returns:
            The outputs that options.outputMode selects, without gradients.

        Raises:
            ValueError: a batch that the options' product does not divide; for training, outputs
                that do not end with a loss. RuntimeError: not attached. FloatingPointError: see
                options.Precision.
        """
        options = self.options
        if not self._attached:
            if options.connection is ConnectionType.Always:
                raise RuntimeError(
                    "the model is detached from its device: call attachToDevice() first"
                )
            self.attachToDevice()
        batch: Any = (args, kwargs)
        if options.synthetic_data:
            self._data = _synthetic_like(batch) if self._data is None else self._data
            batch = self._data
        parts, per_step = self._split(batch)
        mode = options.output_mode
        if mode is None:
            mode = OutputMode.Final if self._training else OutputMode.All
        if mode is OutputMode.EveryN and options.device_iterations % options.output_every:
            raise ValueError(
                f"outputMode: the period {options.output_every} must divide deviceIterations, "
                f"{options.device_iterations}"
            )
        outputs = _Outputs(options, mode, per_step)
        with self._set_mode(), _use_cache(self._cache_folder()):
            for i in range(options.device_iterations):
                step = parts[i * per_step : (i + 1) * per_step]
                self._train(step, outputs) if self._training else self._infer(step, outputs)
            if options.profile_folder is not None:
                self._write_profiles(options.profile_folder)
        return outputs.result()

    def _write_profiles(self, folder: Path) -> None:
        names = {layer: name for name, layer in self.model.named_modules()}
        folder.mkdir(parents=True, exist_ok=True)
        for layer, executor in self._executors:
            name = "-".join(filter(None, (self.options.model_name, names[layer])))
            for programs in list(executor.runner.layers.values())[-1:]:
                write_layer_report(folder / f"{name}.html", programs)

    def _train(self, step: list[Any], outputs: _Outputs) -> None:
        options = self.options.Training
        mean = options.reduction is ReductionType.Mean and len(step) > 1
        optimizer = self._optimizer
        bare = optimizer.optimizer if isinstance(optimizer, SparseTrainer) else optimizer
        bare.zero_grad()
        for args, kwargs in step:
            output = self._compiled()(*args, **kwargs)
            loss = _loss_of(output)
            self._check(output)
            (loss / len(step) if mean else loss).backward()
            outputs.add(output)
        optimizer.step()

    def _infer(self, step: list[Any], outputs: _Outputs) -> None:
        with torch.no_grad():
            for args, kwargs in step:
                output = self._compiled()(*args, **kwargs)
                self._check(output)
                outputs.add(output)

    def _check(self, output: Any) -> None:
        if self.options.Precision.floating_point_exceptions:
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and not bool(torch.isfinite(leaf).all()):
                    raise FloatingPointError("an output is infinite or NaN")

    def _compiled(self) -> Callable[..., Any]:
        if self._code is None:
            self._code = self.model
            if self._backend is not False:
                self._code = torch.compile(self.model, backend=self._backend)
        return self._code

    @contextmanager
    def _set_mode(self) -> Iterator[None]:
        """Set training or evaluation mode and the target; restore both afterwards."""
        flags = [(module, module.training) for module in self.model.modules()]
        self.model.train(self._training)
        try:
            with use_executors(self._executors):
                yield
        finally:
            for module, flag in flags:
                module.training = flag


def trainingModel(
    model: nn.Module,
    options: Options | None = None,
    optimizer: Optimizer | SparseTrainer | None = None,
    *,
    target: Any = None,
    compile: bool | str = True,
) -> WrappedModel:
    """Wrap a model for training: a call runs forward, backward and the optimizer's step many times.

        training = poptorch.trainingModel(model, options, optimizer=ds.RigL(model, adam, ...))
        for images, labels in loader:  # poptorch.DataLoader
            output, loss = training(images, labels)

    Args:
        model: its forward takes the data and the labels and returns the loss, or outputs of which
            the last is the loss.
        options: options such as the number of steps of a call, and its outputs.
        optimizer: an optimizer of the model's parameters, or a sparse trainer if patterns change.
            Defaults to SGD with a learning rate of 0.01, as in PopTorch.
        target: a `machine.Target`, to compute the sparse layers' products on that tile machine.
        compile: False disables `torch.compile`; a name selects a backend other than inductor,
            which needs a C++ compiler on the CPU. With a target nothing is compiled.

    Raises:
        TypeError: arguments of other types, or a dtype that the target does not support.
    """
    if optimizer is None:
        check_kind("model", model, nn.Module, "a torch.nn.Module")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return WrappedModel(model, options, optimizer, True, target, compile)


def inferenceModel(
    model: nn.Module,
    options: Options | None = None,
    *,
    target: Any = None,
    compile: bool | str = True,
) -> WrappedModel:
    """Wrap a model for inference: a call computes many batches in evaluation mode; see
    `trainingModel`."""
    return WrappedModel(model, options, None, False, target, compile)


def identity_loss(x: Tensor, reduction: str = "mean") -> Tensor:
    """Mark `x` as the loss, reduced by "mean", "sum" or "none".

    Source: PopTorch user guide, "identity_loss". Here it only reduces: the loss is the last output
    of the model.
    """
    if reduction == "mean":
        return x.mean()
    if reduction == "sum":
        return x.sum()
    if reduction == "none":
        return x
    raise ValueError(f'reduction must be "mean", "sum" or "none", got {shorten(reduction)}')


def _loss_of(output: Any) -> Tensor:
    last = output[-1] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(last, Tensor) or last.numel() != 1 or not last.requires_grad:
        raise ValueError(
            "for training the model must return the loss, or outputs with the loss last, as a "
            "scalar that depends on the weights"
        )
    return last.reshape(())


def _make_executors(
    model: nn.Module, target: Any, memory: float | None
) -> list[tuple[SparseLinear, Any]]:
    layers = [layer for layer in model.modules() if isinstance(layer, SparseLinear)]
    if not layers:
        raise ValueError("target is for sparse layers, of which the model has none")
    if any(layer.executor is not None for layer in layers):
        raise ValueError("a layer has its own target or active subset: leave out target here")
    options = None if memory is None else {"available_memory_proportion": memory}
    return [(layer, make_executor(target, layer.values.dtype, options)) for layer in layers]
