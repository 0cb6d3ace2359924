"""Make a model sparse, and dense again, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_choice, check_kind, check_types
from dynsparse.allocation import allocate
from dynsparse.nn.active_set import warn_of_active_sets
from dynsparse.nn.attend import deinterleaved_order
from dynsparse.nn.attention import PROJECTIONS, SparseMultiheadAttention
from dynsparse.nn.backends import make_executor
from dynsparse.nn.calibration import Groups, list_batches, sum_inputs
from dynsparse.nn.candidates import (
    Candidate,
    find_candidates,
    group_tied,
    resolve_overrides,
    select_candidates,
)
from dynsparse.nn.conv import SparseConv1d, SparseConv2d, from_dense_conv
from dynsparse.nn.embedding import SparseEmbedding, TiedHead
from dynsparse.nn.exclusions import (
    OVERRIDABLE,
    check_no_adapters,
    check_no_hooks,
    default_exclusions,
)
from dynsparse.nn.linear import SparseConv1D, SparseGraphLinear, SparseLinear, make_linear
from dynsparse.nn.models import describe
from dynsparse.nn.prune import (
    LEAST_SPARSITY,
    find_nonzero_pattern,
    global_counts,
    score_blocks,
    select_best_blocks,
    sparsegpt,
)
from dynsparse.nn.quantized import QuantizedSparseLinear
from dynsparse.nn.transformers_import import set_quantizers
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import ShardSpec

# Batch size for which the table of a trained model is printed.
_BATCH = 512


@check_types
@torch.no_grad()
def sparsify(
    model: nn.Module,
    density: float | None = None,
    block_size: int | None = None,
    allocation: str | None = None,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    densities: Mapping[str, float] | None = None,
    block_sizes: Mapping[str, int] | None = None,
    start: str = "random",
    calibration: Iterable[Any] | None = None,
    per_row: bool | None = None,
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
    Excluded by default are embeddings and layers that share their weight with one or cannot stay
    tied for another reason, LoRA-like adapters, depthwise convolutions, and layers with hooks; the
    printed table lists them. An `nn.Embedding` that `include` names in full becomes a
    `SparseEmbedding`, and an `nn.Linear` tied to it a `TiedHead` with the same values. dtype,
    device, `requires_grad`, the training flag and the biases stay the same; the Parameters of the
    weights are new, so create the optimizer afterwards. A copy of another part of the model, such
    as a target network, gets the patterns of its original with start="random" and "magnitude".

    Names are those of `model.named_modules()`; the projections of an attention are `q_proj`,
    `k_proj`, `v_proj` and `out_proj`. A pattern is a glob in which `*` also matches dots. It
    matches a module and everything inside: "head" matches the module `head` and its submodules, but
    not `lm_head` or `decoder.head`, which "*head" matches.

    Args:
        density: non-zeros / elements of all converted layers together, in (0, 1], rounded to the
            nearest block; layers of a copy are rounded as those of the original. Defaults to 0.1,
            unless `densities` matches every layer.
        block_size: edge of the blocks. Defaults to 1; with start="nonzero" to the largest of 4, 8,
            16, 32, 64 and 128 for which no block of the layer holds both zeros and other values.
        allocation: how the density is distributed over the layers: "uniform", "er" or "erk", see
            `dynsparse.allocation.allocate`; with start="magnitude" or "wanda" also "global", which
            keeps the blocks with the best scores of all layers, at least one in each. Defaults to
            "uniform" with a start that has `calibration`, to "erk" otherwise.
        include: patterns of the layers to convert; None for all but those excluded by default.
            Embeddings are converted only if `include` has their full names.
        exclude: patterns of the layers that stay dense; overrides `include`.
        densities: pattern -> density of each layer it matches. The first match counts. These layers
            get their non-zeros first; the others share the rest.
        block_sizes: pattern -> block size, overriding `block_size`; the first match counts.
        start: how the patterns and values begin:
            "random": for an untrained model. Draws the patterns and scales the model's values
            there by sqrt(in / connections of the row), so that outputs have the variance of the
            dense layer's (Evci et al. 2022, "Gradient Flow in Sparse Neural Networks and How
            Lottery Tickets Win", section 3.1).
            "magnitude": for a trained model. Keeps the blocks with the largest sum of magnitudes.
            "wanda": likewise, with magnitudes times input norms (Sun et al. 2023).
            "sparsegpt": prunes by the error in the outputs, and compensates for it with the weights
            that stay (Frantar and Alistarh 2023, with a damping of 1 %).
            "nonzero": for a model that was pruned. Keeps what is not zero; `density`, `densities`
            and `allocation` do not apply. Layers with less than 1 % zeros count as dense; those of
            zeros alone, such as a head that begins at zero, stay dense. With a `block_size`, zeros
            inside of present blocks become values that training changes.
        calibration: batches for "wanda" and "sparsegpt", such as a few dozen sequences of tokens:
            an iterable of tensors, or of tuples or dictionaries of arguments. The model runs in
            evaluation mode, block by block, so that each block is pruned with the inputs that it
            gets from the pruned blocks before it; layers outside the chain of blocks come last.
            Linear layers only.
        per_row: whether all block rows of a layer begin with the same number of blocks, to within
            one: a fixed fan-in. Defaults to True for "wanda", whose paper compares scores within a
            row, and to False for the others. Of the trainers, only `Static` preserves it.
        generator: random generator of the patterns.
        keep_sparse: whether layers of density 1 become sparse layers with every weight present.
            With density=1 this is the start of gradual pruning (`GMP`, `GraNet`), in which every
            layer then counts towards the final density.
        target, target_options: see `SparseLinear`; for linear layers only.
        verbose: whether to print the table of `dynsparse.nn.describe`; for 512 samples unless the
            start is "random".

    Returns:
        The model.

    Raises:
        TypeError, ValueError: a density outside (0, 1] or one that cannot be reached, a block size
            that does not divide a layer, a pattern that matches nothing, an included module that
            cannot be converted, nothing to convert, an option that `start` does not use, a weight
            shared with a layer that is treated differently, a target that does not support a layer,
            a layer that no calibration batch reaches. The model is then unchanged, also after an
            error that it raises on a calibration batch.
    """
    _check_start(start, density=density, densities=densities, allocation=allocation,
                 calibration=calibration, per_row=per_row)  # fmt: skip
    batches = None if calibration is None else list_batches(calibration)
    if block_size is None and start != "nonzero":
        block_size = 1
    if allocation is None:
        allocation = "erk" if batches is None else "uniform"
    per_row = start == "wanda" if per_row is None else per_row
    candidates = find_candidates(model)
    excluded = default_exclusions(model, candidates)
    selected = select_candidates(model, candidates, excluded, include, exclude)
    densities = resolve_overrides("densities", {} if densities is None else densities, selected)
    block_sizes = {} if block_sizes is None else block_sizes
    block_sizes = resolve_overrides("block_sizes", block_sizes, selected)
    settings = {n: (densities.get(n), block_sizes.get(n, block_size)) for n in selected}
    fixed = {name: reason for name, reason in excluded.items() if reason not in OVERRIDABLE}
    groups = {group[0].name: group for group in group_tied(candidates, fixed, settings)}
    for group in groups.values():
        _check_group(group, start)
    blocks: dict[str, Any] = {name: settings[name][1] for name in groups}
    if start == "nonzero":
        plans = _find_nonzero_plans(groups, blocks)
        if not plans or (all(plan.is_dense for plan in plans.values()) and not keep_sparse):
            raise ValueError(
                "none of the selected layers has 1 % zeros or more beside other values: prune the "
                "model first, or use a start other than 'nonzero'"
            )
    else:
        if density is None and len(densities) < len(selected):
            density = 0.1
        counts = _allocate(model, groups, density, allocation, blocks, densities, batches)
        plans = {n: _Plan(group, counts[n], blocks[n]) for n, group in groups.items()}
    originals = _find_originals(plans, densities) if start in ("random", "magnitude") else {}
    for name, original in originals.items():
        plans[name] = plans[name]._replace(nnz=plans[original].nnz)
    converted = {n: plan for n, plan in plans.items() if keep_sparse or not plan.is_dense}
    steps: Iterable[Mapping[str, Tensor | None]] = [dict.fromkeys(converted)]
    if batches is not None:
        calibrated = {name: plan.group for name, plan in converted.items()}
        steps = sum_inputs(model, calibrated, batches, products=start == "sparsegpt")
    replaced: dict[str, nn.Module] = {}
    patterns: dict[str, SparsePattern] = {}
    try:
        for step in steps:
            layers: dict[str, nn.Module] = {}
            for name, sums in step.items():
                plan = converted[name]
                if name in originals:
                    plan = plan._replace(pattern=patterns[originals[name]])
                pattern, matrix = _make_initial_weight(plan, start, per_row, sums, generator)
                patterns[name] = pattern
                layers |= make_sparse_layers(plan.group, pattern, pattern.values_of(matrix))
            if target is not None or target_options is not None:
                _put_on_target(layers, target, target_options)
            replaced |= replace_layers(model, candidates, layers)
    except BaseException:
        for name, module in replaced.items():
            model.set_submodule(name, module)
        raise
    disable_fast_paths(model)
    set_quantizers(model)
    if verbose:
        elements = sum(plan.group[0].weight.numel() for plan in plans.values())
        nonzeros = sum(plan.nnz * plan.block_size**2 for plan in plans.values())
        requested = "as found" if start == "nonzero" else "requested: by layer"
        if density is not None:
            requested = f"requested: {density:g}"
        print(describe(model, batch=None if start == "random" else _BATCH))
        chosen = "selected layer" if len(plans) == 1 else f"{len(plans)} selected layers"
        print(f"density of the {chosen}: {nonzeros / elements:.6g} ({requested})")
    return model


class _Plan(NamedTuple):
    """How the layers of one weight begin.

    Attributes:
        group: the candidates.
        nnz, block_size: the number of blocks and their size.
        pattern: the pattern, if the zeros of the weight determine it, or the weight is a copy.
    """

    group: Sequence[Candidate]
    nnz: int
    block_size: int
    pattern: SparsePattern | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the layers stay dense unless `keep_sparse` is set."""
        if self.pattern is not None:
            return self.pattern.density > 1 - LEAST_SPARSITY
        return self.nnz * self.block_size**2 == self.group[0].weight.numel()


def _find_originals(plans: Mapping[str, _Plan], densities: Mapping[str, float]) -> dict[str, str]:
    """Return for each layer of a copy of another part of the model, such as a target network or a
    momentum encoder, the name of the original, whose pattern it gets.

    Its weight is equal, but not constant, and its name differs in more than numbers:
    `nn.TransformerEncoder` begins with equal layers, which become different ones.
    """
    originals: dict[str, str] = {}
    by_sizes: dict[Any, list[str]] = {}
    for name, plan in plans.items():
        weight, words = plan.group[0].weight.detach(), _words(name)
        first = weight.reshape(-1)[:8].tolist()
        if len({*first}) == 1 and bool((weight == first[0]).all()):
            continue
        sizes = plan.group[0].matrix_shape, plan.block_size, densities.get(name)
        key = *sizes, weight.dtype, weight.device, *first
        for other in by_sizes.setdefault(key, []):
            if words != _words(other) and torch.equal(weight, plans[other].group[0].weight):
                originals[name] = other
                break
        else:
            by_sizes[key].append(name)
    return originals


def _words(name: str) -> list[str]:
    """Return the parts of a layer's name that are no numbers."""
    return [part for part in name.split(".") if not part.isdigit()]


_INAPPLICABLE = {
    "random": ("calibration",),
    "magnitude": ("calibration",),
    "wanda": (),
    "sparsegpt": (),
    "nonzero": ("density", "densities", "allocation", "calibration", "per_row"),
}
"""start -> the arguments that it does not use."""

_CALIBRATED = ("wanda", "sparsegpt")
"""The starts that need `calibration`."""


def _check_start(start: Any, **arguments: Any) -> None:
    check_choice("start", start, _INAPPLICABLE)
    for name in _INAPPLICABLE[start]:
        if arguments[name] is not None:
            raise ValueError(f"{name} does not apply to start={start!r}: leave it out")
    if start in _CALIBRATED and arguments["calibration"] is None:
        raise ValueError(f"start={start!r} needs calibration=, batches for the model")
    if arguments["allocation"] == "global" and start not in ("magnitude", "wanda"):
        raise ValueError(
            f"allocation='global' is for start='magnitude' and 'wanda', not for {start!r}"
        )


def _check_group(group: Sequence[Candidate], start: str) -> None:
    """Raise ValueError or TypeError if `start` cannot convert the layers of one weight."""
    for candidate in group:
        name, weight = candidate.name, candidate.weight
        check_replaceable(candidate)
        if weight.is_meta:
            raise ValueError(
                f"the layer {name!r} is on the meta device: give the model its weights first"
            )
        if not weight.is_floating_point():
            raise TypeError(f"the weight of {name!r} must be floating point, got {weight.dtype}")
        if not bool(weight.isfinite().all()):
            raise ValueError(f"the weight of {name!r} has entries that are NaN or infinite")
        is_linear = candidate.kind not in ("conv", "attention", "embedding")
        is_tied = candidate.kind == "embedding" and any(c.kind == "Linear" for c in group)
        if start in _CALIBRATED and not (is_linear or is_tied):
            raise ValueError(
                f"start={start!r} is for linear layers, and {name!r} belongs to a "
                f"{type(candidate.module).__name__}: exclude it, or use start='magnitude'"
            )


def _find_nonzero_plans(
    groups: Mapping[str, Sequence[Candidate]], blocks: Mapping[str, int | None]
) -> dict[str, _Plan]:
    """Return the plans that keep what is not zero, of weights with anything but zeros: a sparse
    layer without values would never learn."""
    patterns = {n: find_nonzero_pattern(group[0], blocks[n]) for n, group in groups.items()}
    return {n: _Plan(groups[n], p.nnz, p.block_size, p) for n, p in patterns.items() if p.nnz}


def _put_on_target(
    layers: Mapping[str, nn.Module], target: Any, options: Mapping[str, Any] | None
) -> None:
    """Give each layer its own executor on the target."""
    for name, layer in layers.items():
        if not isinstance(layer, SparseLinear):
            continue  # the head of a table
        if isinstance(layer, (SparseConv1d, SparseConv2d)):
            raise ValueError(
                f"the convolution {name!r} cannot run on a target, only linear layers can: exclude "
                "it, or leave target out"
            )
        layer.executor = make_executor(target, layer.values.dtype, options)


def _allocate(
    model: nn.Module,
    groups: Groups,
    density: float | None,
    allocation: str,
    blocks: Mapping[str, int],
    densities: Mapping[str, float],
    batches: Sequence[Any] | None,
) -> dict[str, int]:
    """Return the number of blocks of each layer."""
    counts = allocate(
        {name: group[0].shape for name, group in groups.items()},
        density,
        method="uniform" if allocation == "global" else allocation,
        block_size=blocks,
        densities={name: densities[name] for name in groups if name in densities},
    )
    if allocation != "global":
        return counts
    if density is None or densities or len(set(blocks.values())) > 1:
        raise ValueError(
            "allocation='global' compares the blocks of all layers: leave densities and "
            "block_sizes out"
        )
    squares: dict[str, Tensor] = {}
    if batches is not None:
        for sums in sum_inputs(model, groups, batches, products=False):
            squares |= sums
    scores = {
        name: score_blocks(group[0].matrix, squares.get(name), blocks[name])
        for name, group in groups.items()
    }
    return global_counts(scores, density)


def _make_initial_weight(
    plan: _Plan,
    start: str,
    per_row: bool,
    sums: Tensor | None,
    generator: torch.Generator | None,
) -> tuple[SparsePattern, Tensor]:
    """Return the initial pattern of a layer, and a matrix [out, in] that has its values.

    Args:
        per_row: whether rows keep the same number of blocks.
        sums: the sums over the inputs of the layer, see `sum_inputs`.
    """
    matrix, shape = plan.group[0].matrix, plan.group[0].matrix_shape
    nnz, b = plan.nnz, plan.block_size
    if plan.pattern is not None and start != "random":
        return plan.pattern, matrix
    if start == "sparsegpt":
        assert sums is not None
        return sparsegpt(matrix, sums, nnz, b, per_row)
    if start != "random":
        flat = select_best_blocks(score_blocks(matrix, sums, b), nnz, per_row).cpu()
        return SparsePattern.from_flat(flat, shape=shape, block_size=b), matrix
    pattern = plan.pattern
    if pattern is None:
        pattern = SparsePattern.random(
            shape, nnz=nnz, block_size=b, per_row=per_row, generator=generator
        )
    fan_in = torch.bincount(pattern.rows.long(), minlength=pattern.grid[0]).clamp(min=1)
    scale = (shape[1] / (fan_in * b)).sqrt().repeat_interleave(b)
    return pattern, matrix * scale.to(matrix.device, matrix.dtype)[:, None]


@torch.no_grad()
def densify(model: nn.Module) -> nn.Module:
    """Replace a model's sparse layers by dense ones with the same weights, in place.

    The inverse of `sparsify`: `SparseLinear` becomes `nn.Linear`, or the class of linear layer it
    replaced; `SparseConv2d` and `SparseConv1d` become `nn.Conv2d` and `nn.Conv1d`;
    `SparseMultiheadAttention` becomes `nn.MultiheadAttention`; `SparseEmbedding` becomes
    `nn.Embedding`, and a `TiedHead` an `nn.Linear` with its weight. dtype, device, `requires_grad`,
    the training flag and the biases stay the same; the Parameters of the weights are new, so create
    the optimizer afterwards.

    Returns:
        The model.

    Raises:
        TypeError: not a module.
        ValueError: a model without sparse layers; a model that is itself a sparse layer, which
            cannot be replaced in place; a layer with hooks or with adapters of `sparse_lora`; an
            attention with an `attention_pattern`, or with a `head_dim` that `nn.MultiheadAttention`
            cannot have. The model is then unchanged.
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    warn_of_active_sets(model)
    made: dict[int, nn.Module] = {}
    names: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SparseLinear) and isinstance(module.executor, ShardSpec):
            raise ValueError(
                f"densify needs full layers, but this rank holds only a shard of {name!r}: use "
                "dynsparse.distributed.gather(model), the state of the full model"
            )
        inside = any(name.startswith(f"{other}.") for other in names)
        if not inside and isinstance(module, (SparseLinear, SparseMultiheadAttention, TiedHead)):
            names[name] = module
    if not names and any(isinstance(m, QuantizedSparseLinear) for m in model.modules()):
        raise ValueError("densify does not convert int8 layers: densify the model before quantize")
    if not names:
        raise ValueError("the model has no sparse layers")
    if "" in names:
        raise ValueError(
            f"the model is a single {type(model).__name__}, which cannot be replaced in place: "
            "put it into a torch.nn.Sequential"
        )
    check_no_adapters(model, names)
    for name, module in names.items():
        check_no_hooks(f"the layer {name!r}", module)
        if isinstance(module, TiedHead) and module.table not in names.values():
            raise ValueError(f"the table of the head {name!r} is not in this model")
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
    # Heads come last: their weights are those of the dense tables.
    for name, module in sorted(names.items(), key=lambda item: isinstance(item[1], TiedHead)):
        if id(module) not in made:
            if isinstance(module, TiedHead):
                weight: Any = made[id(module.table)].weight
                dense: nn.Module = make_linear(weight, module.bias, module.training)
            elif isinstance(module, SparseMultiheadAttention):
                dense = _make_dense_attention(module)
            else:
                dense = module.to_dense_layer()
            made[id(module)] = dense.train(module.training)
        model.set_submodule(name, made[id(module)])
    restore_fast_paths(model)
    set_quantizers(model)
    return model


def _make_dense_attention(attention: SparseMultiheadAttention) -> nn.MultiheadAttention:
    parts: dict[str, Any] = {part: getattr(attention, part) for part in PROJECTIONS}
    for part, layer in parts.items():
        if isinstance(layer, SparseLinear):
            parts[part] = layer.to_dense_layer()
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
    """Return a new Parameter with the features in another order, or None for None."""
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


def make_sparse_layers(
    group: Sequence[Candidate], pattern: SparsePattern, values: Tensor
) -> dict[str, nn.Module]:
    """Return name -> the sparse layer for each candidate of one weight.

    All share one layer, except for linear layers tied to an embedding: each becomes the head of the
    sparse table.
    """
    table = next((candidate for candidate in group if candidate.kind == "embedding"), group[0])
    layer: Any = _make_sparse_layer(table, pattern, values)
    heads: dict[int, nn.Module] = {}
    for candidate in group:
        is_head = isinstance(layer, SparseEmbedding) and candidate.kind == "Linear"
        if is_head and id(candidate.module) not in heads:
            head = TiedHead(layer, _as_parameter(candidate.bias, candidate.bias_parameter))
            heads[id(candidate.module)] = head.train(candidate.module.training)
    return {candidate.name: heads.get(id(candidate.module), layer) for candidate in group}


@torch.no_grad()
def _make_sparse_layer(
    candidate: Candidate, pattern: SparsePattern, values: Tensor
) -> SparseLinear:
    """Make a sparse layer with these values, and bias, dtype, device and flags of the candidate.

    It is on the device of the values if the candidate is on the meta device.
    """
    weight = candidate.weight
    device = values.device if weight.is_meta else weight.device
    module: Any = candidate.module
    layer: SparseLinear
    if candidate.kind == "conv":
        layer = from_dense_conv(candidate.module, pattern, values, device)
    elif candidate.kind == "embedding":
        layer = SparseEmbedding(
            *candidate.shape,
            pattern=pattern,
            padding_idx=module.padding_idx,
            values=values,
            device=device,
            dtype=weight.dtype,
        )
    else:
        layer = _CLASSES.get(candidate.kind, SparseLinear)(
            candidate.shape[1],
            candidate.shape[0],
            bias=False,
            pattern=pattern,
            values=values,
            device=device,
            dtype=weight.dtype,
        )
    layer._module_name = candidate.name
    layer.register_parameter("bias", _as_parameter(candidate.bias, candidate.bias_parameter))
    layer.values.requires_grad_(candidate.parameter.requires_grad)
    if isinstance(layer, (SparseConv1D, SparseGraphLinear)):
        layer.dense_class = type(candidate.module)
    return layer.train(candidate.owner.training)


def _as_parameter(tensor: Tensor | None, parameter: Tensor | None) -> nn.Parameter | None:
    """Return the Parameter itself, or a new one for a part of a packed Parameter."""
    if tensor is None or parameter is None or isinstance(tensor, nn.Parameter):
        return tensor  # type: ignore[return-value]
    return nn.Parameter(tensor.detach().clone(), requires_grad=parameter.requires_grad)


def _make_dense_projection(candidate: Candidate) -> nn.Module:
    """Return a projection of a dense attention as a layer; the output projection is one already."""
    if candidate.owner is not candidate.module:
        return candidate.owner
    weight = _as_parameter(candidate.weight, candidate.parameter)
    assert weight is not None
    return make_linear(
        weight, _as_parameter(candidate.bias, candidate.bias_parameter), candidate.module.training
    )


def replace_layers(
    model: nn.Module, candidates: Mapping[str, Candidate], layers: Mapping[str, nn.Module]
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
                    _make_dense_projection(candidates[name_of_part]) if sparse is None else sparse
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
