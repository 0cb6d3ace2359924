"""Which layers `sparsify` excludes by default, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from dynsparse.nn.candidates import Candidate, group_by_weight, join_names

ADAPTER = "is the adapter of another layer"
DEPTHWISE = "is a depthwise convolution, whose outputs see one channel each"
EMBEDDING = "is an embedding or shares its weight with one: include all of them by their names"

OVERRIDABLE = frozenset({ADAPTER, DEPTHWISE, EMBEDDING})
"""Reasons that `include` overrides: such layers can be sparse but seldom should."""

_HOOKS = "has hooks, which its conversion would lose"

# Names that torchtune and hand-written modules use; PEFT layers list their own.
_ADAPTERS = frozenset({"lora_A", "lora_B", "lora_a", "lora_b"})


def default_exclusions(model: nn.Module, candidates: Mapping[str, Candidate]) -> dict[str, str]:
    """Return name -> the reason for its exclusion, worded to follow "it".

    All candidates of one weight have the same reason.
    """
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append((name, module))
    adapters = _find_adapters(model)
    reasons: dict[str, str] = {}
    for group in group_by_weight(candidates):
        reason = _find_reason(group, owners[id(group[0].parameter)], adapters)
        if reason is not None:
            reasons |= {candidate.name: reason for candidate in group}
    return {name: reasons[name] for name in candidates if name in reasons}


def _find_reason(
    group: list[Candidate], owners: list[tuple[str, nn.Module]], adapters: set[str]
) -> str | None:
    for candidate in group:
        parts = candidate.module, candidate.owner
        if candidate.parameter._backward_hooks or any(map(has_hooks, parts)):
            return _HOOKS
    if reason := _untieable_reason(group, owners):
        return reason
    if any(n in adapters for candidate in group for n in _iterate_parents(candidate.name)):
        return ADAPTER
    if any(candidate.kind == "embedding" for candidate in group):
        return EMBEDDING
    return DEPTHWISE if any(map(_is_depthwise, group)) else None


def _untieable_reason(group: list[Candidate], owners: list[tuple[str, nn.Module]]) -> str | None:
    """Return the reason why a weight that several modules share cannot stay tied, or None."""
    first = next((other for other in group if other.kind == "embedding"), group[0])
    for other in group:
        if other.module is first.module or (first.kind, other.kind) == ("embedding", "Linear"):
            continue
        if other.kind != first.kind or other.kind not in ("Linear", "embedding"):
            return (
                f"shares its weight but not its layer: {first.name!r} "
                f"({type(first.module).__name__}) and {other.name!r} "
                f"({type(other.module).__name__}); use one module in both places"
            )
        if first.kind == "Linear":
            part, same = "bias", other.bias_parameter is first.bias_parameter
        else:
            part, same = "padding_idx", other.module.padding_idx == first.module.padding_idx
        if not same:
            return (
                f"shares its weight but not its {part}: {first.name!r} and {other.name!r}; "
                "use one module in both places"
            )
    inside = {id(candidate.owner) for candidate in group}
    for name, module in owners:
        if id(module) not in inside:
            return f"shares its weight with {name!r} ({type(module).__name__})"
    return None


def _is_depthwise(candidate: Candidate) -> bool:
    groups = getattr(candidate.module, "groups", 1)
    return candidate.kind == "conv" and candidate.weight.shape[1] == 1 and groups > 1


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, which its replacement would lose."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def check_no_hooks(name: str, module: nn.Module) -> None:
    """Raise ValueError if a module that will be replaced, or one inside it, has hooks.

    Args:
        name: names the module in the error.
    """
    if any(map(has_hooks, module.modules())):
        raise ValueError(f"{name} has hooks, which would be lost: remove them first")


def check_no_adapters(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError if a layer of these names has adapters that compute with its pattern."""
    for name in names:
        if hasattr(model.get_submodule(name.rpartition(".")[0]), "delta_values"):
            raise ValueError(
                f"the layer {name!r} has adapters: merge them first, with merge_and_unload()"
            )


def _find_adapters(model: nn.Module) -> set[str]:
    """Return the names of the modules that contain nothing but adapters."""
    names = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if name.rpartition(".")[2] in _ADAPTERS:
            names.add(name)
        listed = getattr(module, "adapter_layer_names", ())
        if isinstance(listed, (tuple, list)):
            names |= {join_names(name, str(part)) for part in listed}
    return names


def _iterate_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
