"""What `sparsify` leaves dense when nobody says otherwise, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from dynsparse.nn.candidates import Site
from dynsparse.nn.linear import SparseLinear

ADAPTER = "is the adapter of another layer"
DEPTHWISE = "is a depthwise convolution, whose outputs see one channel each"

BY_CHOICE = frozenset({ADAPTER, DEPTHWISE})
"""The reasons for which a layer stays dense that could be sparse: it is small, and meant so."""

_HOOKS = "has hooks, which its conversion would lose"

# As torchtune and many a hand-written module call them; PEFT says of each layer which they are.
_ADAPTERS = frozenset({"lora_A", "lora_B", "lora_a", "lora_b"})


def default_exclusions(model: nn.Module, sites: Mapping[str, Site]) -> dict[str, str]:
    """name -> why this site stays dense, to be read after "it"; those that share a weight alike."""
    groups: dict[tuple[int, str | None], list[Site]] = {}
    for site in sites.values():
        groups.setdefault(site.key, []).append(site)
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append((name, module))
    adapters = _adapters(model)
    found: dict[str, str] = {}
    for group in groups.values():
        reason = _tie(group, owners[id(group[0].parameter)])
        if any(_has_hooks(site.module) or _has_hooks(site.owner) for site in group):
            reason = _HOOKS
        if reason is None and any(n in adapters for site in group for n in _and_above(site.name)):
            reason = ADAPTER
        if reason is None and any(_is_depthwise(site) for site in group):
            reason = DEPTHWISE
        if reason is not None:
            found |= {site.name: reason for site in group}
    return {name: found[name] for name in sites if name in found}


def _tie(group: list[Site], owners: list[tuple[str, nn.Module]]) -> str | None:
    """Why a weight cannot stay tied between the places that it has, or None."""
    first = group[0]
    for other in group[1:]:
        same = other.module is first.module
        if not same and (other.kind, other.kind) != (first.kind, "Linear"):
            return (
                f"shares its weight but not its layer: {first.name!r} "
                f"({type(first.module).__name__}) and {other.name!r} "
                f"({type(other.module).__name__}); use one module in both places"
            )
        if not same and other.bias_parameter is not first.bias_parameter:
            return (
                f"shares its weight but not its bias: {first.name!r} and {other.name!r}; "
                "use one module in both places"
            )
    inside = {id(site.owner) for site in group}
    for name, module in owners:
        if id(module) not in inside:
            return f"shares its weight with {name!r} ({type(module).__name__})"
    return None


def _is_depthwise(site: Site) -> bool:
    groups = getattr(site.module, "groups", 1)
    return site.kind == "conv" and site.weight.shape[1] == 1 and groups > 1


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks,
                module._backward_hooks, module._backward_pre_hooks))  # fmt: skip


def _adapters(model: nn.Module) -> set[str]:
    """The names of modules that hold adapters and nothing else."""
    found = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if name.rpartition(".")[2] in _ADAPTERS:
            found.add(name)
        told = getattr(module, "adapter_layer_names", ())
        if isinstance(told, (tuple, list)):
            found |= {f"{name}.{part}" if name else str(part) for part in told}
    return found


def _and_above(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def unconverted(model: nn.Module, sites: Mapping[str, Site]) -> dict[str, tuple[int, int]]:
    """kind of module -> (how many, parameters of their weights), for those that have no site.

    Vectors are not counted: norms, biases and tokens have nothing that could be left out.
    """
    seen = {id(site.parameter) for site in sites.values()}
    found: dict[str, tuple[int, int]] = {}
    for module in model.modules():
        if isinstance(module, SparseLinear):
            continue
        own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        seen |= {id(parameter) for parameter in own}
        size = sum(p.numel() for p in own if not is_lazy(p) and p.numel() > max(p.shape, default=1))
        if size:
            kind = type(module).__name__
            modules, parameters = found.get(kind, (0, 0))
            found[kind] = (modules + 1, parameters + size)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))
