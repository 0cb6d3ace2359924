"""Make a model sparse, and dense again, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_flag, check_generator, shortened
from dynsparse.allocation import allocate
from dynsparse.nn.attend import deinterleaved_order
from dynsparse.nn.attention import PROJECTIONS, SparseMultiheadAttention
from dynsparse.nn.backends import executor_for
from dynsparse.nn.candidates import (
    Candidate,
    find_candidates,
    group_tied,
    resolve_overrides,
    select,
)
from dynsparse.nn.conv import SparseConv1d, SparseConv2d, dense_conv, from_dense_conv
from dynsparse.nn.embedding import SparseEmbedding
from dynsparse.nn.exclusions import OVERRIDABLE, default_exclusions
from dynsparse.nn.init import largest_blocks
from dynsparse.nn.linear import SparseConv1D, SparseGraphLinear, SparseLinear
from dynsparse.nn.models import describe
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import ShardSpec


@torch.no_grad()
def sparsify(
    model: nn.Module,
    density: float | None = 0.1,
    block_size: int = 1,
    allocation: str = "erk",
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    densities: Mapping[str, float] | None = None,
    block_sizes: Mapping[str, int] | None = None,
    start: str = "random",
    generator: torch.Generator | None = None,
    keep_sparse: bool = False,
    target: Any = None,
    target_options: Mapping[str, Any] | None = None,
    verbose: bool = True,
) -> nn.Module:
    """Replace a model's linear layers and convolutions by sparse ones, in place.

    It converts `nn.Linear`, `nn.Conv2d`, `nn.Conv1d`, the `Conv1D` of GPT-2 implementations, the
    `Linear` of PyTorch Geometric, and the projections of `nn.MultiheadAttention`, which becomes a
    `SparseMultiheadAttention`. A layer of density 1 stays dense unless `keep_sparse` is True.
    Excluded by default are layers whose weight is also an embedding's or cannot stay tied for
    another reason, LoRA-like adapters, depthwise convolutions, and layers with hooks; the printed
    table lists them. dtype, device, `requires_grad`, the training flag and the biases stay
    the same; the Parameters of the weights are new, so create the optimizer afterwards.

    Names are those of `model.named_modules()`; the projections of an attention are `q_proj`,
    `k_proj`, `v_proj` and `out_proj`. A pattern is a glob in which `*` also matches dots. It
    matches a module and everything inside: "head" matches the module `head` and its submodules, but
    not `lm_head` or `decoder.head`, which "*head" matches.

    Args:
        density: non-zeros / elements of all converted layers together, in (0, 1], rounded to the
            nearest block. None if `densities` matches every layer.
        block_size: edge of the blocks.
        allocation: how the density is distributed over the layers: "uniform", "er" or "erk", see
            `dynsparse.allocation.allocate`.
        include: patterns of the layers to convert; None for all but those excluded by default.
        exclude: patterns of the layers that stay dense; overrides `include`.
        densities: pattern -> density of each layer it matches. The first match counts. These layers
            get their non-zeros first, the others share the rest.
        block_sizes: pattern -> block size, overriding `block_size`; the first match counts.
        start: "magnitude", for a trained model, keeps the blocks with the largest sum of magnitudes
            and their values. "random", for a model just initialised, draws the patterns and scales
            the model's values there by sqrt(in / connections of the row), so that outputs have the
            variance of the dense layer's (Evci et al. 2022, "Gradient Flow in Sparse Neural
            Networks and How Lottery Tickets Win", section 3.1).
        generator: random generator of the patterns.
        keep_sparse: whether layers of density 1 become sparse layers with every weight present.
            With density=1 this is the start of gradual pruning (`GMP`, `GraNet`), in which every
            layer then counts towards the final density.
        target, target_options: see `SparseLinear`; for linear layers only.
        verbose: whether to print the table of `dynsparse.nn.describe`.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: a density outside (0, 1] or one that cannot be reached, a block size
            that does not divide a layer, a pattern that matches nothing, an included module that
            cannot be converted, nothing to convert, a weight shared with a layer that is treated
            differently, a target that does not support a layer. The model is then unchanged.
    """
    _check_model(model)
    check_generator(generator)
    check_flag("keep_sparse", keep_sparse)
    if not isinstance(start, str) or start not in ("random", "magnitude"):
        raise ValueError(f"start must be 'random' or 'magnitude', got {shortened(start)}")
    candidates = find_candidates(model)
    excluded = default_exclusions(model, candidates)
    selected = select(model, candidates, excluded, include, exclude)
    densities = resolve_overrides("densities", {} if densities is None else densities, selected)
    block_sizes = {} if block_sizes is None else block_sizes
    block_sizes = resolve_overrides("block_sizes", block_sizes, selected)
    settings = {n: (densities.get(n), block_sizes.get(n, block_size)) for n in selected}
    fixed = {name: reason for name, reason in excluded.items() if reason not in OVERRIDABLE}
    groups = {group[0].name: group for group in group_tied(candidates, fixed, settings)}
    for group in groups.values():
        for candidate in group:
            _check_candidate(candidate)
    blocks = {name: settings[name][1] for name in groups}
    counts = allocate(
        {name: group[0].shape for name, group in groups.items()},
        density,
        method=allocation,
        block_size=blocks,
        densities={name: densities[name] for name in groups if name in densities},
    )
    layers: dict[str, SparseLinear] = {}
    for name, group in groups.items():
        candidate = group[0]
        if counts[name] * blocks[name] ** 2 == candidate.weight.numel() and not keep_sparse:
            continue
        layer = _initial_layer(candidate, counts[name], blocks[name], start, generator)
        layers |= {other.name: layer for other in group}
    if target is not None or target_options is not None:
        _put_on_target(layers, target, target_options)
    replace_layers(model, candidates, layers)
    disable_fast_paths(model)
    if verbose:
        elements = sum(group[0].weight.numel() for group in groups.values())
        nnz = sum(counts[name] * blocks[name] ** 2 for name in groups)
        requested = "by layer" if density is None else f"{density:g}"
        print(describe(model))
        achieved = f"{nnz / elements:.6g} (requested: {requested})"
        print(f"density of the {len(groups)} selected layers: {achieved}")
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


def _check_candidate(candidate: Candidate) -> None:
    check_replaceable(candidate)
    if not candidate.weight.is_floating_point():
        raise TypeError(
            f"the weight of {candidate.name!r} must be floating point, got {candidate.weight.dtype}"
        )
    if not bool(candidate.weight.isfinite().all()):
        raise ValueError(f"the weight of {candidate.name!r} has entries that are NaN or infinite")


def _put_on_target(
    layers: Mapping[str, SparseLinear], target: Any, options: Mapping[str, Any] | None
) -> None:
    """Give each layer its own executor on the target."""
    for name, layer in layers.items():
        if isinstance(layer, (SparseConv1d, SparseConv2d)):
            raise ValueError(
                f"the convolution {name!r} cannot run on a target, only linear layers can: exclude "
                "it, or leave target out"
            )
        layer.executor = executor_for(target, layer.values.dtype, options)


def _initial_layer(
    candidate: Candidate, nnz: int, block_size: int, start: str, generator: torch.Generator | None
) -> SparseLinear:
    """The sparse layer for a candidate, with its initial pattern and values."""
    matrix, shape = candidate.matrix, candidate.matrix_shape
    if start == "magnitude":
        pattern = largest_blocks(matrix, nnz, block_size)
        return make_sparse_layer(candidate, pattern, pattern.values_of(matrix), generator)
    pattern = SparsePattern.random(shape, nnz=nnz, block_size=block_size, generator=generator)
    values = pattern.values_of(matrix)
    fan_in = torch.bincount(pattern.rows.long(), minlength=pattern.grid[0]).clamp(min=1)
    scale = (shape[1] / (fan_in * block_size)).sqrt()[pattern.rows.long()]
    scale = scale.to(values.device, values.dtype)
    values = values * scale.view(-1, *[1] * (values.dim() - 1))
    return make_sparse_layer(candidate, pattern, values, generator)


@torch.no_grad()
def densify(model: nn.Module) -> nn.Module:
    """Replace a model's sparse layers by dense ones with the same weights, in place.

    The inverse of `sparsify`: `SparseLinear` becomes `nn.Linear`, or the class of linear layer it
    replaced; `SparseConv2d` and `SparseConv1d` become `nn.Conv2d` and `nn.Conv1d`;
    `SparseMultiheadAttention` becomes `nn.MultiheadAttention`; `SparseEmbedding` becomes
    `nn.Embedding`. dtype, device, `requires_grad`, the training flag and the biases stay the same;
    the Parameters of the weights are new, so create the optimizer afterwards.

    Returns:
        The model.

    Raises:
        TypeError: not a module.
        ValueError: a model without sparse layers; a model that is itself a sparse layer, which
            cannot be replaced in place; an attention with an `attention_pattern`, or with a
            `head_dim` that `nn.MultiheadAttention` cannot have. The model is then unchanged.
    """
    _check_model(model)
    made: dict[int, nn.Module] = {}
    names: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SparseLinear) and isinstance(module.executor, ShardSpec):
            raise ValueError(
                f"densify needs full layers, but this rank holds only a shard of {name!r}: take "
                "dynsparse.distributed.gather(model), the state of the full model"
            )
        inside = any(name.startswith(f"{other}.") for other in names)
        if not inside and isinstance(module, (SparseLinear, SparseMultiheadAttention)):
            names[name] = module
    if not names:
        raise ValueError("the model has no sparse layers")
    if "" in names:
        raise ValueError(
            f"the model is a single {type(model).__name__}, which cannot be replaced in place: "
            "put it into a torch.nn.Sequential"
        )
    for name, module in names.items():
        if isinstance(module, SparseMultiheadAttention):
            if module.attention_pattern is not None:
                raise ValueError(
                    f"the attention {name!r} has an attention_pattern, which nn.MultiheadAttention "
                    "cannot have: set it to None first, and pass the dense attention a mask instead"
                )
            inner = module.num_heads * module.head_dim
            if inner != module.embed_dim:
                raise ValueError(
                    f"the attention {name!r} has {module.num_heads} heads of {module.head_dim} for "
                    f"{module.embed_dim} features, which nn.MultiheadAttention cannot have: make "
                    "its head_dim embed_dim / num_heads, or densify the model without it"
                )
    for name, module in names.items():
        if id(module) not in made:
            dense = (
                _dense_attention(module)
                if isinstance(module, SparseMultiheadAttention)
                else _dense_layer(module)
            )
            made[id(module)] = dense.train(module.training)
        model.set_submodule(name, made[id(module)])
    restore_fast_paths(model)
    return model


def _dense_layer(layer: nn.Module) -> nn.Module:
    """A dense layer with the weights of a sparse one; dense layers are returned unchanged."""
    if isinstance(layer, (SparseConv1D, SparseGraphLinear)):
        return layer.dense()
    if isinstance(layer, (SparseConv1d, SparseConv2d)):
        return dense_conv(layer)
    if isinstance(layer, SparseEmbedding):
        freeze = not layer.values.requires_grad
        return nn.Embedding.from_pretrained(layer.to_dense(), freeze, layer.padding_idx)
    if isinstance(layer, SparseLinear):
        weight = nn.Parameter(layer.to_dense(), requires_grad=layer.values.requires_grad)
        return make_linear(weight, layer.bias, layer.training)
    return layer


def _dense_attention(attention: SparseMultiheadAttention) -> nn.MultiheadAttention:
    parts: dict[str, Any] = {part: _dense_layer(getattr(attention, part)) for part in PROJECTIONS}
    bias_k, bias_v = attention.bias_k, attention.bias_v
    run = attention.interleave_length
    if run is not None:
        order = deinterleaved_order(attention.embed_dim, attention.num_heads, run)
        for part, layer in parts.items():
            dim = 1 if part == "out_proj" else 0
            bias = layer.bias if dim else _reorder_features(layer.bias, order, 0)
            parts[part] = make_linear(
                _reorder_features(layer.weight, order, dim), bias, layer.training
            )
        bias_k, bias_v = _reorder_features(bias_k, order, 2), _reorder_features(bias_v, order, 2)
    out = parts.pop("out_proj")
    dense = nn.MultiheadAttention(
        attention.embed_dim,
        attention.num_heads,
        attention.dropout,
        bias=out.bias is not None,
        add_bias_kv=attention.bias_k is not None,
        add_zero_attn=attention.add_zero_attn,
        kdim=attention.kdim,
        vdim=attention.vdim,
        batch_first=attention.batch_first,
        device="meta",
    )
    if dense.in_proj_weight is None:
        for part, layer in parts.items():
            setattr(dense, f"{part}_weight", layer.weight)
    else:
        dense.in_proj_weight = _concatenate([layer.weight for layer in parts.values()])
    if dense.in_proj_bias is not None:
        dense.in_proj_bias = _concatenate([layer.bias for layer in parts.values()])
    dense.out_proj.weight, dense.out_proj.bias = out.weight, out.bias
    dense.bias_k, dense.bias_v = bias_k, bias_v
    return dense


def _reorder_features(parameter: Any, order: torch.Tensor, dim: int) -> Any:
    """A new Parameter with the features in another order, or None for None."""
    if parameter is None:
        return None
    turned = parameter.detach().index_select(dim, order.to(parameter.device))
    return nn.Parameter(turned, requires_grad=parameter.requires_grad)


def _concatenate(parameters: list[nn.Parameter]) -> nn.Parameter:
    trained = any(parameter.requires_grad for parameter in parameters)
    return nn.Parameter(torch.cat([p.detach() for p in parameters]), requires_grad=trained)


_CLASSES: dict[str, type[SparseLinear]] = {"Conv1D": SparseConv1D, "graph": SparseGraphLinear}


def check_replaceable(candidate: Candidate) -> None:
    """Raise ValueError if the layer cannot be replaced."""
    if not candidate.module_name:
        raise ValueError(
            f"the model is a single {type(candidate.module).__name__}, which cannot be replaced in "
            "place: put it into a torch.nn.Sequential"
        )
    if candidate.weight.is_meta:
        raise ValueError(
            f"the layer {candidate.name!r} is on the meta device: give the model its weights first"
        )


@torch.no_grad()
def make_sparse_layer(
    candidate: Candidate, pattern: SparsePattern, values: Tensor, generator: torch.Generator | None
) -> SparseLinear:
    """A sparse layer with these values, and the bias, dtype, device and flags of the candidate.

    `generator` keeps the layer's own initialisation, which `values` overwrite, from drawing from
    torch's global generator.
    """
    weight = candidate.weight
    layer: SparseLinear
    if candidate.kind == "conv":
        layer = from_dense_conv(candidate.module, pattern, generator)
    else:
        layer = _CLASSES.get(candidate.kind, SparseLinear)(
            candidate.shape[1],
            candidate.shape[0],
            bias=False,
            pattern=pattern,
            generator=generator,
            device=weight.device,
            dtype=weight.dtype,
        )
    layer.values.copy_(values)
    layer._module_name = candidate.name
    layer.register_parameter("bias", _as_parameter(candidate.bias, candidate.bias_parameter))
    layer.values.requires_grad_(candidate.parameter.requires_grad)
    if isinstance(layer, (SparseConv1D, SparseGraphLinear)):
        layer.dense_class = type(candidate.module)
    return layer.train(candidate.owner.training)


def _as_parameter(tensor: Tensor | None, parameter: Tensor | None) -> nn.Parameter | None:
    """The Parameter itself, or a new one for a part of a packed Parameter."""
    if tensor is None or parameter is None or isinstance(tensor, nn.Parameter):
        return tensor  # type: ignore[return-value]
    return nn.Parameter(tensor.detach().clone(), requires_grad=parameter.requires_grad)


def make_linear(weight: nn.Parameter, bias: nn.Parameter | None, training: bool) -> nn.Linear:
    """An `nn.Linear` with the given Parameters; nothing is initialised."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = weight
    linear.register_parameter("bias", bias)
    return linear.train(training)


def _dense_projection(candidate: Candidate) -> nn.Module:
    """A projection of a dense attention as a layer; the output projection is one already."""
    if candidate.owner is not candidate.module:
        return candidate.owner
    weight = _as_parameter(candidate.weight, candidate.parameter)
    assert weight is not None
    return make_linear(
        weight, _as_parameter(candidate.bias, candidate.bias_parameter), candidate.module.training
    )


def replace_layers(
    model: nn.Module, candidates: Mapping[str, Candidate], layers: Mapping[str, SparseLinear]
) -> dict[str, nn.Module]:
    """Replace the candidates by the `layers` of their names.

    An attention with a sparse projection becomes a `SparseMultiheadAttention`, whose other
    projections are dense layers.

    Returns:
        Name -> the module that was replaced.
    """
    made: dict[int, SparseMultiheadAttention] = {}
    replaced: dict[str, nn.Module] = {}
    for name, layer in layers.items():
        candidate = candidates[name]
        replaced[candidate.module_name] = candidate.module
        attention = candidate.module
        if not isinstance(attention, nn.MultiheadAttention):
            model.set_submodule(name, layer)
            continue
        if id(attention) not in made:
            projections: dict[str, nn.Module] = {}
            for part in PROJECTIONS:
                name_of_part = f"{candidate.module_name}.{part}"
                sparse = layers.get(name_of_part)
                projections[part] = (
                    _dense_projection(candidates[name_of_part]) if sparse is None else sparse
                )
            made[id(attention)] = SparseMultiheadAttention.from_projections(attention, projections)
        model.set_submodule(candidate.module_name, made[id(attention)])
    return replaced


_FAST_PATH_FLAGS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu"),  # read for the fused path alone
    (nn.TransformerEncoder, "use_nested_tensor"),
)
_SAVED_FLAG = "_fast_path_before_sparsify"


def disable_fast_paths(model: nn.Module) -> None:
    """Keep torch's encoders with sparse parts off the fused path of evaluation.

    `nn.TransformerEncoderLayer` passes its weights to one fused operator, and
    `nn.TransformerEncoder` packs padded batches for it. Both read flags first, which are set to
    False here and restored by `restore_fast_paths`.
    """
    for module in model.modules():
        for cls, flag in _FAST_PATH_FLAGS:
            if not isinstance(module, cls) or hasattr(module, _SAVED_FLAG):
                continue
            if any(isinstance(part, SparseLinear) for part in module.modules()):
                setattr(module, _SAVED_FLAG, getattr(module, flag))
                setattr(module, flag, type(getattr(module, flag))(0))


def restore_fast_paths(model: nn.Module) -> None:
    """Undo `disable_fast_paths`."""
    for module in model.modules():
        for cls, flag in _FAST_PATH_FLAGS:
            if isinstance(module, cls) and hasattr(module, _SAVED_FLAG):
                setattr(module, flag, getattr(module, _SAVED_FLAG))
                delattr(module, _SAVED_FLAG)
