"""Where a model has weights that can be made sparse, and which of them a user's patterns name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dynsparse.nn.linear import is_conv1d, is_graph_linear
from dynsparse.ops.conv.geometry import to_matrix

_KINDS = (
    "nn.Linear, nn.Conv2d, nn.Conv1d, transformers' Conv1D, PyTorch Geometric's Linear and the "
    "projections of nn.MultiheadAttention can"
)


@dataclass
class Site:
    """One weight that can be made sparse, under one of the names that lead to it.

    Attributes:
        name: of the linear layer, or of the attention and its projection: "attention.q_proj".
        kind: "Linear", "conv", "Conv1D", "graph" or "attention".
        module: what is replaced; owner: what holds the weight's Parameter.
        part: which projection of an attention, else None.
        parameter: as its owner holds it.
        weight: [out, in], of a convolution [out, in / groups, *kernel]; bias: [out] or None;
            bias_parameter: as its owner holds it.
    """

    name: str
    kind: str
    module: nn.Module
    owner: nn.Module
    part: str | None
    parameter: Tensor
    weight: Tensor
    bias: Tensor | None
    bias_parameter: Tensor | None

    @property
    def module_name(self) -> str:
        return self.name if self.part is None else self.name[: -len(self.part)].rstrip(".")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def matrix(self) -> Tensor:
        """The weight as the matrix that the sparse layer has its pattern of."""
        return to_matrix(self.weight) if self.kind == "conv" else self.weight

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1:].numel()

    @property
    def key(self) -> tuple[int, str | None]:
        """The same for the sites of one weight."""
        packed = self.kind == "attention" and self.parameter.shape != self.weight.shape
        return id(self.parameter), self.part if packed else None


def find_sites(model: nn.Module) -> dict[str, Site]:
    """name -> site, in the order of `model.named_modules()`, under every name a module has.

    Layers that only look linear have no site: a subclass with its own forward, a weight that is
    computed from others (weight norm, pruning masks).
    """
    sites: list[Site] = []
    attention: str | None = None
    for name, module in model.named_modules(remove_duplicate=False):
        if attention is not None and name.startswith(attention):
            continue  # its out_proj is a site of the attention
        if _runs(module, nn.MultiheadAttention):
            attention = f"{name}." if name else ""
            sites += _projections(name, module)
        elif (kind := _linear_kind(module)) is not None:
            weight, bias = module.weight, module.bias
            if is_lazy(weight):
                raise ValueError(
                    f"the layer {name!r} has no shape yet: run one batch through the model first"
                )
            sites.append(Site(name, kind, module, module, None, weight, weight, bias, bias))
        elif is_conv1d(module) and "forward" not in module.__dict__:
            weight, bias = module._parameters["weight"], module._parameters.get("bias")
            assert weight is not None
            sites.append(Site(name, "Conv1D", module, module, None, weight, weight.t(), bias, bias))
    return {site.name: site for site in sites}


def _linear_kind(module: nn.Module) -> str | None:
    """The kind of a layer that is a site as it stands."""
    own = isinstance(module._parameters.get("weight"), Tensor)
    if own and _runs(module, nn.Linear):
        return "Linear"
    if own and (_runs(module, nn.Conv2d) or _runs(module, nn.Conv1d)):
        return "conv"
    return "graph" if is_graph_linear(module) else None


def _runs(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether the module computes what `base` does: not a subclass with its own forward."""
    return (
        isinstance(module, base)
        and type(module).forward is base.forward
        and "forward" not in module.__dict__
    )


def _projections(name: str, attention: nn.MultiheadAttention) -> list[Site]:
    packed = attention.in_proj_weight
    separate = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
    weights = separate if packed is None else packed.chunk(3)
    bias = attention.in_proj_bias
    biases: Iterable[Tensor | None] = (None,) * 3 if bias is None else bias.chunk(3)
    parts = ("q_proj", "k_proj", "v_proj")
    sites = [
        Site(_join(name, part), "attention", attention, attention, part,
             weight if packed is None else packed, weight, own_bias, bias)
        for part, weight, own_bias in zip(parts, weights, biases, strict=True)
    ]  # fmt: skip
    out = attention.out_proj
    last = _join(name, "out_proj")
    return [
        *sites,
        Site(last, "attention", attention, out, "out_proj",
             out.weight, out.weight, out.bias, out.bias),
    ]  # fmt: skip


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def matches(pattern: str, name: str) -> bool:
    """Whether the glob matches the name or that of a module above it; `*` matches dots too."""
    pieces = name.split(".")
    return any(fnmatchcase(".".join(pieces[: n + 1]), pattern) for n in range(len(pieces)))


def select(
    model: nn.Module, sites: Mapping[str, Site], left: Mapping[str, str], include: Any, exclude: Any
) -> dict[str, Site]:
    """The sites that `include` names (None: all that are not `left`) and `exclude` does not.

    Args:
        left: name -> why it stays dense unless it is included.

    Raises:
        TypeError: patterns that are not strings.
        ValueError: a pattern without effect, or nothing left.
    """
    include = None if include is None else _patterns("include", include)
    exclude = _patterns("exclude", exclude)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in include or ():
        if not any(matches(pattern, name) for name in sites):
            named = [n for n in names if matches(pattern, n)]
            if not named:
                raise ValueError(f"include: {_nothing(pattern, sites)}")
            kind = type(model.get_submodule(named[0])).__name__
            raise ValueError(
                f"include: {pattern!r} names {named[0]!r} ({kind}), which cannot be made sparse; "
                f"{_KINDS}"
            )
    for pattern in exclude:
        if not any(matches(pattern, name) for name in (*sites, *names)):
            raise ValueError(f"exclude: {_nothing(pattern, sites)}")
    if not sites:
        raise ValueError(f"the model has no layer that can be made sparse: {_KINDS}")
    kept = {
        name: site
        for name, site in sites.items()
        if (name not in left if include is None else any(matches(p, name) for p in include))
        and not any(matches(pattern, name) for pattern in exclude)
    }
    if not kept:
        if include is None and left:
            name, reason = next(iter(left.items()))
            raise ValueError(
                f"none of the {len(sites)} layers is left to convert; {name!r} stays dense: "
                f"it {reason}"
            )
        raise ValueError(f"include and exclude leave none of the {len(sites)} layers to convert")
    return kept


def first_matches(what: str, patterns: Any, names: Iterable[str]) -> dict[str, Any]:
    """name -> the entry of the first pattern that matches it, for the names that have one."""
    if not isinstance(patterns, Mapping):
        raise TypeError(f"{what} must map name patterns to values, got {patterns!r}")
    _patterns(what, list(patterns))
    won = {}
    for name in names:
        for pattern in patterns:
            if matches(pattern, name):
                won[name] = pattern
                break
    for pattern in patterns:
        if pattern not in won.values():
            raise ValueError(
                f"{what}: the pattern {pattern!r} is the first match of no layer that is converted"
            )
    return {name: patterns[pattern] for name, pattern in won.items()}


def _patterns(what: str, patterns: Any) -> list[str]:
    if isinstance(patterns, str):
        return [patterns]
    if not isinstance(patterns, Iterable) or isinstance(patterns, nn.Module):
        raise TypeError(f"{what} must be name patterns such as ['head'], got {patterns!r}")
    patterns = list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{what} must be name patterns such as ['head'], got {pattern!r}")
    return patterns


def _nothing(pattern: str, sites: Mapping[str, Site]) -> str:
    known = list(sites)
    shown = ", ".join(repr(name) for name in known[:3])
    return (
        f"the pattern {pattern!r} matches no module of the model; names are such as {shown}"
        f"{', ...' if len(known) > 3 else ''}"
    )


def tied(
    sites: Mapping[str, Site], left: Mapping[str, str], treatment: Mapping[str, Any]
) -> list[list[Site]]:
    """The sites to convert, those of one weight together.

    Args:
        left: name -> why it cannot be converted.
        treatment: name -> what is to become of it, for the names to convert.

    Raises:
        ValueError: one that cannot be converted, or a weight that cannot stay tied.
    """
    groups: dict[tuple[int, str | None], list[Site]] = {}
    for site in sites.values():
        groups.setdefault(site.key, []).append(site)
    converted = [group for group in groups.values() if any(s.name in treatment for s in group)]
    for group in converted:
        first = next(site for site in group if site.name in treatment)
        if first.name in left:
            raise ValueError(f"{first.name!r} cannot be made sparse, it {left[first.name]}: "
                             f"exclude {first.name!r}")  # fmt: skip
        for site in group:
            if treatment.get(site.name) != treatment[first.name]:
                raise ValueError(
                    f"{first.name!r} and {site.name!r} share their weight but would be treated "
                    "differently: include, exclude, densities and block_sizes must name both or "
                    "neither"
                )
    return converted
