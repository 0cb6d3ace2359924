"""A table of a model's layers, its parameter groups, and averages that follow its patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from dynsparse._core.checks import check_not_negative, check_types
from dynsparse._core.html import html_table
from dynsparse.nn.candidates import Candidate, find_candidates
from dynsparse.nn.conv import SparseConv1d, SparseConv2d
from dynsparse.nn.exclusions import default_exclusions
from dynsparse.nn.experts import find_experts
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.quantized import QuantizedSparseLinear
from dynsparse.nn.sparse_module import SparseModule
from dynsparse.ops.linear import cost_table
from dynsparse.ops.linear.products import KINDS

_HEAD = ("layer", "shape", "block", "density", "non-zeros", "parameters")
_HEAD_OF_BATCH = ("forward", "backward", "speed")
_MOST_ROWS = 40


class Description(str):
    """A table as text, which notebooks display as HTML."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    below: list[str]

    def _repr_html_(self) -> str:
        return html_table(self.rows, self.head, self.below)


@check_types
def describe(model: nn.Module, batch: int | None = None) -> Description:
    """Return a table of a model's sparse layers, of dense layers that could be sparse, and totals.

    Shapes are [out, in], or [out, in / groups, *kernel] for convolutions; non-zeros are counted in
    elements; parameters are weights and biases, of the dense layer and now. A weight that several
    layers share is listed once. In a model of more than 40 layers, those that differ only in the
    numbers in their names share a row, such as "blocks.*.up (12)".

    Below the table are the layers that `sparsify` excludes by default, with the reason, and the
    modules that it cannot convert, by kind, with the number of their parameters (vectors, such as
    biases and norms, are not counted). If these are more than half of the model, a last line warns.

    Args:
        batch: number of samples, such as the tokens of a batch, for which the table also says what
            computes each sparse linear layer, forward and backward (see `SparseLinear.kernel`), and
            the speed-up over a dense layer: predicted for a training step in float32 on this CPU,
            by a cost model whose mean error is 10 to 25 %. A line below the table names the layers
            that gain no time.
    """
    head = _HEAD if batch is None else (*_HEAD, *_HEAD_OF_BATCH)
    slow: list[str] = []
    candidates = {n: c for n, c in find_candidates(model).items() if c.kind != "embedding"}
    int8 = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedSparseLinear)}
    by_weight = {candidate.key: candidate for candidate in reversed(candidates.values())}
    dense = {candidate.name: candidate for candidate in by_weight.values()}
    rows: list[tuple[str, ...]] = []
    saved, now = 0, sum(parameter.numel() for parameter in model.parameters())
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    sparse = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    order = {name: i for i, name in enumerate(names)}
    layers: dict[str, Any] = {**sparse, **dense, **int8}
    # A projection of a dense attention is not a module: it has the place of the attention.
    for name in sorted(layers, key=lambda n: order.get(n, order.get(n.rpartition(".")[0], 0))):
        layer, block, density = layers[name], "-", "dense"
        bias = 0 if layer.bias is None else layer.bias.numel()
        kernels: tuple[str, ...] = ("int8" if name in int8 else "-", "-", "-")
        if name in dense:
            shape, kept = layer.shape, layer.weight.numel()
        else:
            shape = getattr(layer, "weight_shape", (layer.out_features, layer.in_features))
            block, density = f"{layer.block_size}", f"{layer.density:.4f}"
            kept = layer.values.numel()
            saved += prod(shape) - kept
        if name in int8:
            now += kept + bias  # buffers, not parameters
        if name in sparse and batch is not None:
            *passes, speedup = _describe_kernels(layer, batch)
            kernels = (*passes, "-" if speedup is None else f"{speedup:.1f}x")
            if speedup is not None and speedup <= 1:
                slow.append(name)
        row = _make_row(name, shape, block, density, kept, bias)
        rows.append(row if batch is None else (*row, *kernels))
    rows = rows if len(rows) <= _MOST_ROWS else _merge_similar_rows(rows)
    total = f"the model: {now + saved:,} -> {now:,} parameters ({now / max(1, now + saved):.1%})"
    below = [total, *_describe_dense(model, candidates, now + saved)]
    if slow:
        more = f" (and {len(slow) - 1:,} more)" if len(slow) > 1 else ""
        below.append(f"{slow[0]!r}{more} gains no time over a dense layer at this density")
    if any(layer.values.dim() == 1 for layer in sparse.values()):
        below.append(
            "unstructured values have one dimension, like biases: if weight decay depends on "
            "dimensions, use dynsparse.param_groups"
        )
    description = Description("\n".join([*_align_columns([head, *rows]), *below]))
    description.head, description.rows, description.below = head, rows, below
    return description


def _merge_similar_rows(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge the rows of layers that differ only in the numbers in their names."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        alike.setdefault((re.sub(r"\d+", "*", name), *cells), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names):,})", *cells)
        for (pattern, *cells), names in alike.items()
    ]


def _describe_kernels(layer: SparseLinear, batch: int) -> tuple[str, str, float | None]:
    """Return the kernels of a layer, forward and backward, and its predicted speed-up over a dense
    layer, None where no cost model predicts it."""
    if isinstance(layer, (SparseConv1d, SparseConv2d)):
        return "-", "-", None  # depends on the size of the inputs
    forward, backward = (layer.kernel(batch, backward=b) for b in (False, True))
    if layer.executor is not None or not {forward, backward} <= set(KINDS):
        return forward, backward, None
    pattern = layer.pattern
    shape = cost_table.Layer(*pattern.shape, pattern.nnz, pattern.block_size)
    return forward, backward, cost_table.speedup(shape, batch)


def _describe_dense(
    model: nn.Module, candidates: Mapping[str, Candidate], all_parameters: int
) -> list[str]:
    """Return lines about the layers that stay dense at any density."""
    excluded = default_exclusions(model, candidates)
    by_reason: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        more = f" (and {len(names) - 1:,} more like it)" if len(names) > 1 else ""
        lines.append(f"{names[0]!r}{more} stays dense: it {reason}")
    kinds = _count_unconverted(model, candidates)
    experts = {type(module).__name__ for module in find_experts(model).values()}
    for kind, (modules, parameters) in kinds.items():
        advice = ": dynsparse.nn.split_experts makes them linear layers" if kind in experts else ""
        count = _format_count(parameters)
        lines.append(f"{modules:,} {kind}: {count} parameters stay dense{advice}")
    dense = sum(parameters for _, parameters in kinds.values())
    excluded_sizes = {candidates[n].key: candidates[n].weight.numel() for n in excluded}
    dense += sum(excluded_sizes.values())
    if 2 * dense > all_parameters:
        lines.append(
            f"warning: sparsify cannot convert {dense / all_parameters:.1%} of the parameters, so "
            "the model gains little"
        )
    return lines


def _count_unconverted(
    model: nn.Module, candidates: Mapping[str, Candidate]
) -> dict[str, tuple[int, int]]:
    """Return kind -> (count, parameters of their weights), of modules that have no candidate.

    Vectors, such as norms, biases and tokens, are not counted: nothing in them can be left out.
    """
    seen = {id(candidate.parameter) for candidate in candidates.values()}
    kinds: dict[str, tuple[int, int]] = {}
    for module in model.modules():
        if isinstance(module, SparseLinear):
            continue
        parameters = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        seen |= {id(parameter) for parameter in parameters}
        size = sum(
            p.numel() for p in parameters if not is_lazy(p) and p.numel() > max(p.shape, default=1)
        )
        if size:
            kind = type(module).__name__
            count, total = kinds.get(kind, (0, 0))
            kinds[kind] = (count + 1, total + size)
    return dict(sorted(kinds.items(), key=lambda item: -item[1][1]))


def _format_count(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M" if parameters >= 1e6 else f"{parameters:,}"


def _make_row(
    name: str, shape: tuple[int, ...], block: str, density: str, kept: int, bias: int
) -> tuple[str, ...]:
    full = prod(shape)
    parameters = f"{full + bias:,} -> {kept + bias:,}" if kept < full else f"{full + bias:,}"
    return name, " x ".join(map(str, shape)), block, density, f"{kept:,}", parameters


def _align_columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
    return lines


@check_types
def param_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups for an optimizer: with and without weight decay.

        optimizer = torch.optim.AdamW(ds.param_groups(model, weight_decay=0.1), lr=1e-3)

    The values of sparse layers and all Parameters of two or more dimensions decay; biases, norms
    and scalars do not. Choosing by dimensions alone, as many recipes do, would mistake the values
    of layers without blocks, which are [nnz], for biases. Parameters that do not require a gradient
    are in neither group.

    Raises:
        ValueError: a weight decay that is negative or not finite.
    """
    decay = check_not_negative("weight_decay", weight_decay)
    values = {id(m.values) for m in model.modules() if isinstance(m, SparseModule)}
    decaying: list[nn.Parameter] = []
    constant: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_weight = parameter.dim() >= 2 or id(parameter) in values
            (decaying if is_weight else constant).append(parameter)
    return [
        {"params": decaying, "weight_decay": decay},
        {"params": constant, "weight_decay": 0.0},
    ]


@check_types
def follow_patterns(copy: nn.Module, model: nn.Module) -> None:
    """Let the sparse layers of `copy` follow every pattern change of those of `model`.

    An average of weights must do so because the content of a slot changes with the pattern:
    averages of surviving slots stay, those of dropped slots are discarded, and grown slots start at
    zero, as in a masked dense model whose average is masked. Copies made by torch's
    `AveragedModel`, and by the averages of timm, ema-pytorch, ignite, ultralytics and mmengine,
    follow automatically; call this for your own averages and target networks. Pattern changes warn
    of copies that do not follow, get no gradients and are written to. The link lasts while both
    models exist, and is not saved to files.

    Args:
        copy: an average of `model`, or another copy of it. Its weights stay its own.
        model: the model that is trained.

    Raises:
        ValueError: layers that differ in name, shape, block size or pattern.
    """
    copies = {n: m for n, m in copy.named_modules() if isinstance(m, SparseLinear)}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}
    if copies.keys() != layers.keys():
        odd = sorted(copies.keys() ^ layers.keys())[0]
        raise ValueError(f"the models must have the same sparse layers, {odd!r} is only in one")
    for name, layer in copies.items():
        if layer.pattern != layers[name].pattern:
            raise ValueError(f"the layers {name!r} must begin with the same pattern")
    for name, layer in copies.items():
        layers[name].add_follower(layer)
