"""State of every optimizer follows a pattern update; compared with hand-computed cases."""

import warnings
from collections import deque

import pytest
import torch

from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training import rewire_state

# One for each kind of state; test_optimizer_configurations.py has the others.
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.25),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
START = {("adagrad", "sum"): 0.25, ("rprop", "step_size"): 0.1}


def trained(kind, block_size):
    """Take two optimizer steps of a 2 x 3 grid with blocks 0, 2, 5 present."""
    b = block_size
    pattern = SparsePattern([0, 0, 1], [0, 2, 2], shape=(2 * b, 3 * b), block_size=b)
    layer = SparseLinear(3 * b, 2 * b, pattern=pattern)
    optimizer = OPTIMIZERS[kind](layer.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.randn(8, 3 * b)).square().sum().backward()
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("block_size", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_kept_blocks_keep_state_and_grown_blocks_reset(kind, block_size):
    layer, optimizer = trained(kind, block_size)
    # Slot 1 (position 2) leaves and position 4 joins: the blocks become 0, 4, 5.
    rewiring = Rewiring.make(layer.pattern, torch.tensor([1]), torch.tensor([4]))
    state = optimizer.state[layer.values]
    before = {key: t.clone() for key, t in state.items() if isinstance(t, torch.Tensor)}
    pointers = {key: t.data_ptr() for key, t in state.items() if isinstance(t, torch.Tensor)}
    bias_before = {k: t.clone() for k, t in optimizer.state.get(layer.bias, {}).items()
                   if isinstance(t, torch.Tensor)}  # fmt: skip
    rewire_state(optimizer, layer.values, rewiring)
    assert set(before) or kind == "sgd"
    followed = 0
    for key, old in before.items():
        new = state[key]
        assert new.data_ptr() == pointers[key]
        if old.dim() == 0:
            assert torch.equal(new, old)
            continue
        followed += 1
        expected = torch.stack([old[0], torch.full_like(old[0], START.get((kind, key), 0)), old[2]])
        assert torch.equal(new, expected)
    assert followed or kind == "sgd"
    for key, old in bias_before.items():
        assert torch.equal(optimizer.state[layer.bias][key], old)
    # And training goes on.
    layer.rewire(rewiring)
    optimizer.zero_grad()
    layer(torch.randn(8, 3 * block_size)).square().sum().backward()
    optimizer.step()
    assert layer.values.isfinite().all()


def test_state_of_unknown_shape_raises():
    layer, optimizer = trained("adam-fused", 1)
    optimizer.state[layer.values]["sketch"] = torch.zeros(2)
    drop, grow = torch.tensor([0]), torch.tensor([4])
    rewiring = Rewiring.make(layer.pattern, drop, grow, row_major=True)
    with pytest.raises(ValueError, match=r"'sketch' of shape \[2\], which does not follow the 3"):
        rewire_state(optimizer, layer.values, rewiring)


def test_optimizer_without_state():
    layer = SparseLinear(4, 4, density=0.5)
    optimizer = torch.optim.Adam(layer.parameters())
    rewiring = Rewiring.make(layer.pattern, torch.tensor([]), torch.tensor([]))
    rewire_state(optimizer, layer.values, rewiring)
    assert not optimizer.state.get(layer.values)


KEEPS_SLOTS, MOVES = False, True


def follow(state, *, row_major, block_size=1, named=()):
    """Add entries to the state of a layer of three blocks, rewire it, and return it."""
    layer, optimizer = trained("adam-fused", block_size)
    optimizer.state[layer.values].update(state)
    optimizer.state.update(named)
    drop, grow = torch.tensor([0]), torch.tensor([4])
    rewiring = Rewiring.make(layer.pattern, drop, grow, row_major=row_major)
    rewire_state(optimizer, layer.values, rewiring)
    return optimizer.state[layer.values]


class Moments:
    """State that only its optimizer knows."""


UNKNOWN = {
    "deque": deque([torch.ones(3)]),
    "object": Moments(),
    "objects": {"of a layer": [Moments()]},
    "factor": torch.eye(3),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_state_warns_or_raises(kind):
    with pytest.warns(RuntimeWarning, match=r"Adam keeps the state 'own'.* are unknown"):
        state = follow({"own": UNKNOWN[kind]}, row_major=KEEPS_SLOTS)
    assert state["own"] is UNKNOWN[kind]
    with pytest.raises(ValueError, match=r"Adam keeps the state 'own'.* does not follow the 3"):
        follow({"own": UNKNOWN[kind]}, row_major=MOVES)


@pytest.mark.parametrize("row_major", [KEEPS_SLOTS, MOVES])
def test_state_of_the_whole_parameter_stays(row_major):
    shared = [1, 0.5, True, None, "nesterov", torch.float32, torch.tensor(2.0), torch.ones(1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = follow(
            {"own": shared, "queue": deque([None, 1])}, row_major=row_major, block_size=2
        )
    assert state["own"] is shared


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2), (3, 1, 1), (3, 1, 2), (3, 2, 1)])
def test_reduced_blocks_follow(shape):
    state = follow({"own": torch.ones(shape)}, row_major=KEEPS_SLOTS, block_size=2)
    assert (state["own"][0] == 0).all()
    assert (state["own"][1:] == 1).all()


@pytest.mark.parametrize("row_major", [KEEPS_SLOTS, MOVES])
def test_state_by_parameter_under_a_name_follows(row_major):
    layer, optimizer = trained("adam-fused", 1)
    kept = optimizer.state["trac"] = {"step": 3, "s": torch.zeros(2), layer.bias: torch.ones(2)}
    kept[layer.values] = torch.tensor([1.0, 2, 3])
    drop, grow = torch.tensor([0]), torch.tensor([4])
    rewire_state(
        optimizer, layer.values, Rewiring.make(layer.pattern, drop, grow, row_major=row_major)
    )
    assert kept[layer.values].tolist() == ([2, 0, 3] if row_major else [0, 2, 3])
    assert kept[layer.bias].tolist() == [1, 1]


def test_unknown_state_under_a_name_warns_or_raises():
    named = {"averages": [torch.ones(2), torch.ones(3)], "step": 3}
    with pytest.warns(RuntimeWarning, match="Adam keeps the state 'averages', whose entries"):
        follow({}, row_major=KEEPS_SLOTS, named=named)
    with pytest.raises(ValueError, match="Adam keeps the state 'averages', which does not follow"):
        follow({}, row_major=MOVES, named=named)
