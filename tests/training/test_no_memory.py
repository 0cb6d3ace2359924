"""Running out of memory at any point of an update leaves the state before or after it.

Each allocation of a tensor or of an array of a pattern fails once.
"""

import pytest
import torch
from tests.training.states import ALL, backward, make, same, state_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dynsparse.pattern import index_arrays
from dynsparse.training.update import prepare_changes

_SMALL = 32  # bytes; below lie numbers, and single entries


class FailingAllocator(TorchDispatchMode):
    """Fails the n-th operation whose result has new memory."""

    def __init__(self, refused):
        super().__init__()
        self.refused = refused
        self.count = 0

    def take(self, size):
        self.count += size >= _SMALL
        if size >= _SMALL and self.count == self.refused:
            raise MemoryError("no room for this one")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and _memory(made) not in given:
                self.take(made.nbytes)
        return result


def _memory(tensor):
    return tensor.untyped_storage()._cdata


def update(trainer, refused, monkeypatch):
    """Run the update; allocation number `refused` fails. Return (allocations, error or None)."""
    scarce = FailingAllocator(refused)
    empty = index_arrays.empty

    def refusing(*shape, dtype, **more):
        scarce.take(torch.Size(shape).numel() * dtype.itemsize)
        return empty(*shape, dtype=dtype, **more)

    with monkeypatch.context() as patch, scarce:
        patch.setattr(index_arrays, "empty", refusing)
        try:
            trainer.after_optimizer_step()
        except (MemoryError, RuntimeError) as error:
            return scarce.count, str(error)
    return scarce.count, None


@pytest.mark.slow
# What grows in Adagrad's state starts with something else than zero.
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "Adam") for name in ALL), ("rigl", "Adagrad"), ("granet", "Adagrad")],
)
def test_out_of_memory_at_every_point_of_an_update(name, optimizer, monkeypatch):
    def ready():
        kind = getattr(torch.optim, optimizer)
        more = {"initial_accumulator_value": 0.1} if optimizer == "Adagrad" else {}
        model, trainer = make(name, lambda model: kind(model.parameters(), 0.01, **more))
        for step in range(2):
            backward(model, trainer)
            if step:
                trainer.before_optimizer_step()
                trainer.optimizer.step()
            else:
                trainer.step()
        return model, trainer

    model, trainer = ready()
    before = state_of(model, trainer)
    total, error = update(trainer, None, monkeypatch)
    assert error is None
    after = state_of(model, trainer)
    assert total > 20
    assert not same(before, after)

    model, trainer = ready()
    refused = 0
    for refused in range(1, total + 50):
        count, error = update(trainer, refused, monkeypatch)
        if error is None:
            break
        assert "no room for this one" in error
        assert count == refused
        assert same(state_of(model, trainer), before), refused
    # It was made up for, and is what an update with room for all is.
    assert refused > 20
    assert same(state_of(model, trainer), after)


def test_applying_prepared_changes_allocates_nothing(monkeypatch):
    model, trainer = make("rigl")
    seen = []

    def watched(changes, ranks, patterns):
        change_over = prepare_changes(changes, ranks, patterns)

        def counted():
            with FailingAllocator(None) as scarce:
                change_over()
            seen.append(scarce.count)

        return counted

    monkeypatch.setattr("dynsparse.training.trainer.prepare_changes", watched)
    for _ in range(3):
        backward(model, trainer)
        trainer.step()
    assert seen == [0, 0, 0]
