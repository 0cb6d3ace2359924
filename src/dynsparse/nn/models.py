"""A table of a model's layers, its parameter groups, and averages that follow its patterns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dynsparse.checks import check_not_negative
from dynsparse.files.html import html_table
from dynsparse.nn.candidates import Site, find_sites
from dynsparse.nn.exclusions import default_exclusions, unconverted
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.sparse_module import SparseModule
from dynsparse.typed import typed

_HEAD = ("layer", "shape", "block", "density", "non-zeros", "parameters")


class Description(str):
    """A table as text, which notebooks show as one."""

    rows: list[tuple[str, ...]]
    below: list[str]

    def _repr_html_(self) -> str:
        return html_table(self.rows, _HEAD, self.below)


@typed
def describe(model: nn.Module) -> Description:
    """A line for each sparse layer and each dense one that could be sparse, and one for the model.

    Shapes are [out, in], of convolutions [out, in / groups, *kernel]; non-zeros are counted in
    elements; parameters are weights and biases, of the dense layer and now. A weight that several
    layers share is there once.

    Then come the layers that `sparsify` leaves dense of itself, with the reason, and by kind the
    modules that it cannot convert, with the parameters of their weights (vectors, such as biases
    and norms, are not counted). Where these are more than half of the model, a last line warns.
    """
    every = find_sites(model)
    sites = {site.key: site for site in reversed(every.values())}
    dense = {site.name: site for site in sites.values()}
    lines: list[tuple[str, ...]] = []
    saved = 0
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    sparse = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    order = {name: i for i, name in enumerate(names)}
    for name in sorted((*sparse, *dense), key=lambda n: order.get(n, order.get(_parent(n), 0))):
        if name in sparse:
            layer = sparse[name]
            kept, bias = layer.values.numel(), 0 if layer.bias is None else layer.bias.numel()
            full = layer.out_features * layer.in_features
            saved += full - kept
            shape, block = layer.weight_shape, str(layer.block_size)
            lines.append(_line(name, shape, block, f"{layer.density:.4f}", kept, full, bias))
        else:
            site = dense[name]
            bias = 0 if site.bias is None else site.bias.numel()
            full = site.weight.numel()
            lines.append(_line(name, site.shape, "-", "dense", full, full, bias))
    now = sum(parameter.numel() for parameter in model.parameters())
    total = f"the model: {now + saved:,} -> {now:,} parameters ({now / max(1, now + saved):.1%})"
    below = [total, *_left(model, every, now + saved)]
    made = Description("\n".join([*_aligned([_HEAD, *lines]), *below]))
    made.rows, made.below = lines, below
    return made


def _left(model: nn.Module, sites: Mapping[str, Site], all_parameters: int) -> list[str]:
    """What stays dense whatever density is asked for."""
    left = default_exclusions(model, sites)
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        more = f" (and {len(names) - 1:,} more like it)" if len(names) > 1 else ""
        lines.append(f"{names[0]!r}{more} stays dense: it {reason}")
    kinds = unconverted(model, sites)
    for kind, (modules, parameters) in kinds.items():
        lines.append(f"{modules:,} {kind}: {_amount(parameters)} parameters stay dense")
    dense = sum(parameters for _, parameters in kinds.values())
    dense += sum({site.key: site.weight.numel() for n, site in sites.items() if n in left}.values())
    if 2 * dense > all_parameters:
        lines.append(
            f"warning: {dense / all_parameters:.1%} of the parameters are where sparsify cannot "
            "reach them, so the model gains little"
        )
    return lines


def _amount(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M" if parameters >= 1e6 else f"{parameters:,}"


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _line(
    name: str, shape: tuple[int, ...], block: str, density: str, kept: int, full: int, bias: int
) -> tuple[str, ...]:
    parameters = f"{full + bias:,} -> {kept + bias:,}" if kept < full else f"{full + bias:,}"
    return name, " x ".join(map(str, shape)), block, density, f"{kept:,}", parameters


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = []
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
    return lines


@typed
def param_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: what decays, and what does not.

        optimizer = torch.optim.AdamW(ds.param_groups(model, weight_decay=0.1), lr=1e-3)

    The values of sparse layers and every Parameter of two or more dimensions decay; biases, norms
    and scalars do not. A choice by dimensions alone, as in many recipes, takes the values of
    layers without blocks, which are [nnz], for biases. Parameters that do not require a gradient
    are in neither group.

    Raises:
        ValueError: a weight decay that is negative or not finite.
    """
    decay = check_not_negative("weight_decay", weight_decay)
    values = {id(m.values) for m in model.modules() if isinstance(m, SparseModule)}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_weight = parameter.dim() >= 2 or id(parameter) in values
            (decaying if is_weight else others).append(parameter)
    return [
        {"params": decaying, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]


@typed
def follow_patterns(copy: nn.Module, model: nn.Module) -> None:
    """From now on, the sparse layers of `copy` take every pattern that those of `model` take.

    Copies that torch's `AveragedModel` and timm's `ModelEma` make do so by themselves; this is for
    averages of one's own. It lasts as long as both models live, and is not kept in files.

    Args:
        copy: an average of `model`, or another copy of it. Its weights stay its own.
        model: the one that is trained.

    Raises:
        ValueError: layers that differ in name, shape, block size or pattern.
    """
    own = {n: m for n, m in copy.named_modules() if isinstance(m, SparseLinear)}
    theirs = {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}
    if own.keys() != theirs.keys():
        odd = sorted(own.keys() ^ theirs.keys())[0]
        raise ValueError(f"the models must have the same sparse layers, {odd!r} is only in one")
    for name, layer in own.items():
        if layer.pattern != theirs[name].pattern:
            raise ValueError(f"the layers {name!r} must begin with the same pattern")
    for name, layer in own.items():
        theirs[name].lead(layer)
