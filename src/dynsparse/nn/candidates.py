"""Which weights of a model can be made sparse, and which of them a user selects by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dynsparse.nn.linear import is_conv1d, is_graph_linear
from dynsparse.nn.sparse_module import SparseModule
from dynsparse.ops.conv.geometry import to_matrix

_KINDS = (
    "nn.Linear, nn.Conv2d, nn.Conv1d, transformers' Conv1D, PyTorch Geometric's Linear, the "
    "projections of nn.MultiheadAttention, and an nn.Embedding named in full can"
)


@dataclass
class Candidate:
    """A weight that can be made sparse, under one of its names in the model.

    Attributes:
        name: name of the layer, or of the attention and its projection: "attention.q_proj".
        kind: "Linear", "conv", "Conv1D", "graph", "attention" or "embedding".
        module: the module to replace.
        owner: the module that has the weight's Parameter.
        part: the projection of an attention, otherwise None.
        parameter: the owner's Parameter, which may be the transposed or a packed weight.
        weight: [out, in]; [out, in / groups, *kernel] for convolutions; [num_embeddings,
            embedding_dim] for embeddings.
        bias: [out] or None.
        bias_parameter: the owner's Parameter of the bias, which may be packed.
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
        """The weight as the matrix [out, in] of the sparse layer's pattern."""
        return to_matrix(self.weight) if self.kind == "conv" else self.weight

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1:].numel()

    @property
    def key(self) -> tuple[int, str | None]:
        """A key that is equal for all candidates of one weight."""
        packed = self.kind == "attention" and self.parameter.shape != self.weight.shape
        return id(self.parameter), self.part if packed else None


def find_candidates(model: nn.Module) -> dict[str, Candidate]:
    """Return name -> candidate, in the order of `model.named_modules()`, under all names.

    Not among them: subclasses that override `forward` or hold further tensors or modules, weights
    and biases that are computed from other tensors (weight norm, pruning masks), empty weights, and
    embeddings with `max_norm` or `scale_grad_by_freq`.

    Raises:
        ValueError: a lazy layer without a shape.
    """
    candidates: list[Candidate] = []
    attention: str | None = None
    for name, module in model.named_modules(remove_duplicate=False):
        if attention is not None and name.startswith(attention):
            continue  # out_proj is a candidate of the attention
        if _computes_as(module, nn.MultiheadAttention):
            attention = join_names(name, "")
            if not (_holds(module, nn.MultiheadAttention) and _holds(module.out_proj, nn.Linear)):
                continue
            candidates += _find_projections(name, module)
        elif (kind := _linear_kind(module)) is not None:
            weight, bias = module.weight, getattr(module, "bias", None)
            if is_lazy(weight):
                raise ValueError(
                    f"the layer {name!r} has no shape yet: run one batch through the model first"
                )
            candidates.append(
                Candidate(name, kind, module, module, None, weight, weight, bias, bias)
            )
        elif is_conv1d(module) and "forward" not in module.__dict__:
            weight, bias = module._parameters["weight"], module._parameters.get("bias")
            assert weight is not None
            candidates.append(
                Candidate(name, "Conv1D", module, module, None, weight, weight.t(), bias, bias)
            )
    return {candidate.name: candidate for candidate in candidates if candidate.weight.numel()}


def _linear_kind(module: nn.Module) -> str | None:
    """Return the kind of a layer whose Parameter is the weight [out, ...], or None."""
    if _computes_as(module, nn.Linear):
        return "Linear" if _holds(module, nn.Linear) else None
    if _computes_as(module, nn.Embedding):
        plain = module.max_norm is None and not module.scale_grad_by_freq
        return "embedding" if plain and _holds(module, nn.Embedding) else None
    for kind in (nn.Conv2d, nn.Conv1d):
        if _computes_as(module, kind):
            return "conv" if _holds(module, kind) else None
    return "graph" if is_graph_linear(module) else None


def _computes_as(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether the module is a `base` whose `forward` is not overridden."""
    return (
        isinstance(module, base)
        and type(module).forward is base.forward
        and "forward" not in module.__dict__
    )


# All tensors and modules that a layer of each type holds.
_MEMBERS: dict[type[nn.Module], frozenset[str]] = {
    nn.Linear: frozenset({"weight", "bias"}),
    nn.Embedding: frozenset({"weight"}),
    nn.Conv1d: frozenset({"weight", "bias"}),
    nn.Conv2d: frozenset({"weight", "bias"}),
    nn.MultiheadAttention: frozenset(
        {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
        | {"bias_k", "bias_v", "out_proj"}
    ),
}


def _holds(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a module holds what a `base` does, each as a Parameter, and no other state.

    A weight or bias that is computed (weight norm, pruning masks) is no Parameter; the parameters,
    buffers and modules that a subclass adds would be lost.
    """
    members = {*module._parameters, *module._buffers, *module._modules}
    # `nn.MultiheadAttention` sets None for `bias_k` and `bias_v` as plain attributes.
    none = {name for name in ("bias_k", "bias_v") if vars(module).get(name, "") is None}
    has_weight = module._parameters.get("weight", module) is not None
    return has_weight and members | none == _MEMBERS[base]


def _find_projections(name: str, attention: nn.MultiheadAttention) -> list[Candidate]:
    packed = attention.in_proj_weight
    separate = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
    weights = separate if packed is None else packed.chunk(3)
    bias = attention.in_proj_bias
    biases: Iterable[Tensor | None] = (None,) * 3 if bias is None else bias.chunk(3)
    parts = ("q_proj", "k_proj", "v_proj")
    candidates = [
        Candidate(join_names(name, part), "attention", attention, attention, part,
             weight if packed is None else packed, weight, bias_of_part, bias)
        for part, weight, bias_of_part in zip(parts, weights, biases, strict=True)
    ]  # fmt: skip
    out = attention.out_proj
    last = join_names(name, "out_proj")
    return [
        *candidates,
        Candidate(last, "attention", attention, out, "out_proj",
             out.weight, out.weight, out.bias, out.bias),
    ]  # fmt: skip


def join_names(name: str, part: str) -> str:
    """Return the name of a part of the module `name`, which is empty for the model itself."""
    return f"{name}.{part}" if name else part


def matches_name(pattern: str, name: str) -> bool:
    """Whether the glob matches the name or that of a parent module; `*` also matches dots."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def select_candidates(
    model: nn.Module,
    candidates: Mapping[str, Candidate],
    excluded: Mapping[str, str],
    include: Any,
    exclude: Any,
) -> dict[str, Candidate]:
    """Return the candidates that `include` matches and `exclude` does not.

    Args:
        excluded: name -> why it stays dense, for layers that `include=None` excludes.
        include, exclude: glob patterns; `include=None` selects all but `excluded`. An embedding is
            selected by its full name in `include` only.

    Raises:
        TypeError: patterns that are not strings.
        ValueError: a pattern that matches nothing, or no layer selected.
    """
    include = None if include is None else check_patterns("include", include)
    exclude = check_patterns("exclude", exclude)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    known = [name for name, candidate in candidates.items() if candidate.kind != "embedding"]
    for pattern in include or ():
        if not any(_is_included(candidate, [pattern]) for candidate in candidates.values()):
            named = [n for n in names if matches_name(pattern, n)]
            if not named:
                raise ValueError(f"include: {_no_match_message(pattern, known)}")
            kind = type(model.get_submodule(named[0])).__name__
            raise ValueError(
                f"include: {pattern!r} names {named[0]!r} ({kind}), which cannot be made sparse; "
                f"{_KINDS}"
            )
    for pattern in exclude:
        if not any(matches_name(pattern, name) for name in (*candidates, *names)):
            raise ValueError(f"exclude: {_no_match_message(pattern, known)}")
    if not known and include is None:
        if any(isinstance(module, SparseModule) for module in model.modules()):
            raise ValueError(
                "the layers of the model are sparse already: call dynsparse.densify(model) first, "
                "then sparsify(model, ..., start='magnitude')"
            )
        raise ValueError(f"the model has no layer that can be made sparse: {_KINDS}")
    selected = {
        name: candidate
        for name, candidate in candidates.items()
        if (name not in excluded if include is None else _is_included(candidate, include))
        and not any(matches_name(pattern, name) for pattern in exclude)
    }
    if not selected:
        name = next((name for name in known if name in excluded), None)
        if include is None and name is not None:
            raise ValueError(
                f"none of the {len(known)} layers is left to convert; {name!r} stays dense: "
                f"it {excluded[name]}"
            )
        raise ValueError(f"include and exclude leave none of the {len(known)} layers to convert")
    return selected


def _is_included(candidate: Candidate, include: list[str]) -> bool:
    if candidate.kind == "embedding":
        return candidate.name in include
    return any(matches_name(pattern, candidate.name) for pattern in include)


def resolve_overrides(what: str, patterns: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return name -> the value of the first pattern that matches it, for names with a match."""
    if not isinstance(patterns, Mapping):
        raise TypeError(f"{what} must map name patterns to values, got {patterns!r}")
    check_patterns(what, list(patterns))
    first: dict[str, str] = {}
    for name in names:
        for pattern in patterns:
            if matches_name(pattern, name):
                first[name] = pattern
                break
    for pattern in patterns:
        if pattern not in first.values():
            raise ValueError(
                f"{what}: the pattern {pattern!r} is the first match of no layer that is converted"
            )
    return {name: patterns[pattern] for name, pattern in first.items()}


def check_patterns(what: str, patterns: Any) -> list[str]:
    """Return `patterns`, a string or several, as a list.

    Raises:
        TypeError: anything but strings.
    """
    if isinstance(patterns, str):
        return [patterns]
    if not isinstance(patterns, Iterable) or isinstance(patterns, nn.Module):
        raise TypeError(f"{what} must be name patterns such as ['head'], got {patterns!r}")
    patterns = list(patterns)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{what} must be name patterns such as ['head'], got {pattern!r}")
    return patterns


def _no_match_message(pattern: str, known: list[str]) -> str:
    shown = ", ".join(repr(name) for name in known[:3])
    return (
        f"the pattern {pattern!r} matches no module of the model; names are such as {shown}"
        f"{', ...' if len(known) > 3 else ''}"
    )


def group_by_weight(candidates: Mapping[str, Candidate]) -> list[list[Candidate]]:
    """Return the candidates in groups that share their weight."""
    groups: dict[tuple[int, str | None], list[Candidate]] = {}
    for candidate in candidates.values():
        groups.setdefault(candidate.key, []).append(candidate)
    return list(groups.values())


def group_tied(
    candidates: Mapping[str, Candidate], excluded: Mapping[str, str], settings: Mapping[str, Any]
) -> list[list[Candidate]]:
    """Return the candidates to convert, grouped by weight.

    Args:
        excluded: name -> why it cannot be converted.
        settings: name -> how to convert it, for the names to convert.

    Raises:
        ValueError: a layer that cannot be converted, or tied weights with different settings.
    """
    groups = group_by_weight(candidates)
    converted = [group for group in groups if any(member.name in settings for member in group)]
    for group in converted:
        first = next(candidate for candidate in group if candidate.name in settings)
        if first.name in excluded:
            raise ValueError(f"{first.name!r} cannot be made sparse, it {excluded[first.name]}: "
                             f"exclude {first.name!r}")  # fmt: skip
        for candidate in group:
            if settings.get(candidate.name) != settings[first.name]:
                named = ", an embedding by its full name" if candidate.kind == "embedding" else ""
                raise ValueError(
                    f"{first.name!r} and {candidate.name!r} share their weight but would be "
                    "treated differently: include, exclude, densities and block_sizes must match "
                    f"both or neither{named}"
                )
    return converted
