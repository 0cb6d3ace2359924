"""Small trainings, and snapshots of their complete state."""

from typing import Any

import torch
from tiers import algorithms
from torch import Tensor, nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import ConstantSchedule

EVERY = ConstantSchedule(total_steps=1000, update_interval=1, drop_fraction=0.3)

ALL = ("rigl", "set", "snfs", "gmp", "granet", "deepr", "mest", "topkast")
ALGORITHMS = algorithms(ALL)


def make(name: str, optimizer: Any = None, **options: Any) -> Any:
    """Return (model, trainer) with two sparse layers and an update after every step."""
    torch.manual_seed(7)
    density = 1.0 if name == "gmp" else 0.5
    model = nn.Sequential(
        SparseLinear(12, 16, density=density),
        nn.Tanh(),
        SparseLinear(16, 8, density=density, block_size=2 if name not in _ONE_SIZE else 1),
    )
    own = torch.optim.Adam(model.parameters(), 0.01) if optimizer is None else optimizer(model)
    gradual = {"total_steps": 1000, "final_density": 0.1, "update_interval": 1, "scope": "layer"}
    every = {"schedule": EVERY}
    seeded = {**every, "seed": 1}
    arguments: dict[str, Any] = {
        "rigl": every,
        "set": seeded,
        "snfs": {**every, "window": 3},
        "snfs-dense": {**every, "window": None},
        "gmp": {**gradual, "total_steps": 40},
        "granet": gradual,
        "deepr": {"total_steps": 1000, "l1": 0.5, "temperature": 5.0, "seed": 1},
        "mest": {**seeded, "soft_memory_bound": True},
        "topkast": seeded,
    }[name]
    kind = {"rigl": ds.RigL, "set": ds.SET, "gmp": ds.GMP, "granet": ds.GraNet, "deepr": ds.DeepR,
            "mest": ds.MEST, "topkast": ds.TopKAST}.get(name, ds.SNFS)  # fmt: skip
    return model, kind(model, own, **arguments, **options)


_ONE_SIZE = ("snfs", "snfs-dense")


def backward(model: nn.Module, trainer: Any) -> None:
    """Compute the gradients of a batch that depends only on the number of steps."""
    trainer.optimizer.zero_grad()
    data = torch.Generator().manual_seed(trainer.steps)
    model(torch.randn(6, 12, generator=data)).square().mean().backward()


def state_of(model: nn.Module, trainer: Any) -> Any:
    """Copy weights, patterns, index, gradients, optimizer state and the trainer's state."""
    layers = [m for m in model.modules() if isinstance(m, SparseLinear)]
    own = trainer.state_dict()
    return copied(
        {
            "weights": [(p, p.grad) for p in model.parameters()],
            "patterns": [(m.pattern.row_ptr, m.pattern.rows, m.pattern.cols) for m in layers],
            "index": [tuple(m.index) for m in layers],
            "active": [m.active and m.active.slots for m in layers],
            "optimizer": trainer.optimizer.state_dict(),
            "trainer": own,
            "captured": trainer._captures.keys(),
        }
    )


def copied(thing: Any) -> Any:
    """Return a copy, with lists for tuples."""
    if isinstance(thing, Tensor):
        return thing.detach().clone()
    if isinstance(thing, dict):
        return {key: copied(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, type({}.keys()))):
        return [copied(item) for item in thing]
    return thing


def same(a: Any, b: Any) -> bool:
    """Return whether two states are equal bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(_bits(a), _bits(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
