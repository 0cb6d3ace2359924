"""Runs a model on calibration data block by block, and collects the inputs of blocks and layers.

Language models are chains of blocks: a block takes the hidden states that the one before returns.
So a block can be changed, and the next one gets the outputs of the changed block, while each block
computes every batch only two or three times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse._core.checks import shorten
from dynsparse.nn.candidates import Candidate, join_names


class Blocks:
    """The chain of blocks of a model, and what calibration batches pass to each.

    Attributes:
        names: the names of the blocks in the model; empty if its blocks are not a chain.
        inputs: the hidden states that each batch passes to the first block.
        masks: the padding mask of each batch, as for `drop_padding`.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any], layers: Mapping[str, int]) -> None:
        """Find the chain, and run the model on every batch to record the arguments of the blocks.

        Args:
            layers: name -> size of the layers of interest: the chain is the list of modules that
                holds most of them.
        """
        self.model = model
        self.names = _find_chain(model, layers)
        self.inputs: list[Tensor] = []
        self.masks: list[Tensor | None] = []
        self._others: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        if not self.names:
            return
        self.masks = [_padding_mask(model, batch, self.names[0]) for batch in batches]
        for batch in batches:
            calls = self._record(batch)
            if calls is None:
                self.names, self.inputs, self._others = [], [], []
                return
            self.inputs.append(calls[0][0][0])
            self._others.append([(args[1:], named) for args, named in calls])

    def _record(self, batch: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]] | None:
        """Run the model on a batch; return the arguments of every block.

        None unless each block is called once and takes what the one before returns, and none takes
        a key-value cache, which another call would append to.
        """
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        returned: list[Tensor] = []

        def record_call(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not calls and args and isinstance(args[0], Tensor):
                args = (args[0].clone(), *args[1:])  # the model may write to it
            calls.append((args, named))

        def record_output(_: nn.Module, _args: Any, output: Any) -> None:
            returned.append(_hidden(output))

        with ExitStack() as stack:
            for name in self.names:
                block = self.model.get_submodule(name)
                hook = block.register_forward_pre_hook(record_call, with_kwargs=True)
                stack.callback(hook.remove)
                stack.callback(block.register_forward_hook(record_output).remove)
            call_model(self.model, batch)
        taken = [args[0] for args, _ in calls if args]
        is_chain = len(taken) == len(calls) == len(self.names) and all(
            isinstance(x, Tensor) and (k == 0 or x is returned[k - 1]) for k, x in enumerate(taken)
        )
        has_cache = any(_is_cache(x) for args, named in calls for x in (*args, *named.values()))
        return calls if is_chain and not has_cache else None

    def run(self, k: int, batch: int, hidden: Tensor) -> Tensor:
        """Return the output of block k, as it is now, for the hidden states of a batch."""
        args, named = self._others[batch][k]
        # Copied, because the block may write to them.
        return _hidden(self.model.get_submodule(self.names[k])(hidden.clone(), *args, **named))

    def run_all(self, k: int, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of block k for the hidden states of every batch."""
        return [self.run(k, batch, x) for batch, x in enumerate(hidden)]


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _is_cache(x: Any) -> bool:
    return any("cache" in base.__name__.lower() for base in type(x).__mro__)


def _find_chain(model: nn.Module, layers: Mapping[str, int]) -> list[str]:
    """Return the names of the modules in the list that holds the largest part of the layers."""
    best, most = "", 0
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            prefix = join_names(name, "")
            size = sum(n for layer, n in layers.items() if layer.startswith(prefix))
            if size > most:
                best, most = name, size
    if not most:
        return []
    return [join_names(best, part) for part, _ in model.get_submodule(best).named_children()]


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model on a batch: a dictionary of arguments, a tuple or list of them, or one.

    A `use_cache` of the dictionary counts as False.
    """
    if isinstance(batch, Mapping):
        return model(**{k: False if k == "use_cache" else x for k, x in batch.items()})
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def list_batches(calibration: Any) -> list[Any]:
    """Return the calibration batches as a list.

    Raises:
        TypeError: not an iterable of batches.
        ValueError: no batches.
    """
    if not isinstance(calibration, Iterable) or isinstance(calibration, (Tensor, Mapping, str)):
        raise TypeError(
            "calibration must be batches, such as a DataLoader or a list of token tensors, got "
            f"{shorten(calibration)}"
        )
    batches = list(calibration)
    if not batches:
        raise ValueError("calibration has no batches")
    return batches


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode, without a key-value cache, inside the context."""
    training = [(module, module.training) for module in model.modules()]
    # Parts of a model can have their own, and a model can be inside another module.
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules())}
    caching: list[Any] = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    model.eval()
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for module, flag in training:
            module.training = flag
        for config in caching:
            config.use_cache = True


Groups = Mapping[str, Sequence[Candidate]]


@torch.no_grad()
def sum_inputs(
    model: nn.Module, groups: Groups, batches: Sequence[Any], *, products: bool
) -> Iterator[dict[str, Tensor]]:
    """Add up x^2 [in], or x x^T [in, in], over the inputs x of layers, block by block.

    Between two blocks the caller may replace layers: the next block gets the outputs of the changed
    blocks. Layers outside the chain of blocks come last, all together.

    Positions where the `attention_mask` [samples, length] of a batch is 0 do not count, but in the
    decoder of an encoder-decoder model, which has other positions.

    Args:
        groups: name -> the layers that share the weight of this name.
        products: whether the sums are those of products.

    Yields:
        name -> sum, float32, or float64 for such inputs.

    Raises:
        ValueError: a layer that no batch reaches, inputs that are NaN or infinite.
    """
    left = dict(groups)
    with evaluation_mode(model):
        blocks = Blocks(model, batches, {n: g[0].weight.numel() for n, g in groups.items()})
    hidden = blocks.inputs
    for k, block in enumerate(blocks.names):
        inside = {
            name: left.pop(name)
            for name, group in list(left.items())
            if all(f"{layer.name}.".startswith(f"{block}.") for layer in group)
        }
        if inside:
            with evaluation_mode(model), _observe(model, inside, products) as inputs:
                for n, x in enumerate(hidden):
                    inputs.batch = batches[n]
                    blocks.run(k, n, x)
            yield _check_sums(inputs.sums, inside)
        if k + 1 < len(blocks.names):
            with evaluation_mode(model):
                hidden = blocks.run_all(k, hidden)
    if left:
        with evaluation_mode(model), _observe(model, left, products) as inputs:
            for inputs.batch in batches:
                call_model(model, inputs.batch)
        yield _check_sums(inputs.sums, left)


def _padding_mask(model: nn.Module, batch: Any, name: str) -> Tensor | None:
    """Return the attention mask [samples, length] of a batch, which is 0 where it is padded.

    None if it is not that of the layer or block `name`: in encoder-decoder models it is that of the
    encoder's inputs.
    """
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if has_encoder and "decoder" in name.split("."):
        return None
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def drop_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x as a matrix [positions, features], without the positions at which `mask` is 0.

    Args:
        x: [..., features]; all its positions are kept if it has others than the mask.
        mask: [samples, length], or None.
    """
    shape, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    if mask is not None and shape in (mask.shape, (mask.numel(),)):
        x = x[mask.flatten().to(x.device) != 0]
    return x


@dataclass
class _Inputs:
    """The sums over inputs so far, and the batch that runs."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    batch: Any = None


@contextmanager
def _observe(model: nn.Module, groups: Groups, products: bool) -> Iterator[_Inputs]:
    inputs = _Inputs()
    sums = inputs.sums

    def observe(name: str, x: Tensor) -> None:
        x = drop_padding(x.detach(), _padding_mask(model, inputs.batch, name))
        x = x if x.dtype == torch.float64 else x.float()
        added = x.t() @ x if products else x.square().sum(0)
        sums[name] = sums[name] + added if name in sums else added

    with ExitStack() as stack:
        for name, group in groups.items():
            layers = [layer for layer in group if layer.kind != "embedding"]  # these take ids
            for owner in {id(layer.owner): layer.owner for layer in layers}.values():
                hook = owner.register_forward_pre_hook(
                    lambda _, args, named, name=name: observe(name, (*args, *named.values())[0]),
                    with_kwargs=True,
                )
                stack.callback(hook.remove)
        yield inputs


def _check_sums(sums: dict[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    for name in groups:
        if name not in sums:
            raise ValueError(
                f"no calibration batch passes through the layer {name!r}: add some that do, "
                "exclude it, or use start='magnitude'"
            )
        if not bool(sums[name].isfinite().all()):
            raise ValueError(f"the inputs of the layer {name!r} are NaN or infinite")
    return sums
