"""Optimizer state and the algorithms' own state where the pattern or the values of a layer are
loaded or set during a training."""

import copy
from itertools import permutations

import pytest
import torch
from torch import nn

import dynsparse as ds

X = torch.randn(2000, 32, generator=torch.Generator().manual_seed(7))
Y = (X[:, :8] * X[:, 8:16]).argmax(1)


def make(algorithm="RigL", seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(
        ds.nn.SparseLinear(32, 64, density=0.2), nn.ReLU(), ds.nn.SparseLinear(64, 8, density=0.4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"total_steps": 100, "update_interval": 10} | options
    return model, optimizer, getattr(ds, algorithm)(model, optimizer, **options)


def train(training, first, last):
    model, optimizer, trainer = training
    for i in range(first, last):
        optimizer.zero_grad()
        batch = slice(i * 16, i * 16 + 16)
        nn.functional.cross_entropy(model(X[batch]), Y[batch]).backward()
        trainer.step()


def begin_step(model, optimizer, trainer):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X[:16]), Y[:16]).backward()
    trainer.before_optimizer_step()


def dense_momentum(model, optimizer):
    layer = model[0]
    momentum = optimizer.state[layer.values]["momentum_buffer"]
    return layer.pattern.to_dense(momentum), layer.pattern.to_mask()


def check_followed(before, after):
    (old, was), (new, now) = before, after
    assert (was & ~now).any()
    assert torch.equal(new[was & now], old[was & now])
    assert not new[now & ~was].any()


def test_momentum_follows_an_earlier_model():
    training = model, optimizer, _ = make()
    train(training, 0, 15)
    best = copy.deepcopy(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())  # another object holds the state from here on
    train(training, 15, 45)
    before = dense_momentum(model, optimizer)
    model.load_state_dict(best)
    begin_step(*training)
    check_followed(before, dense_momentum(model, optimizer))


@pytest.mark.parametrize("algorithm", ["RigL", "DeepR"])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_states_load_in_any_order(order, algorithm):
    training = make(algorithm)
    train(training, 0, 25)
    states = [copy.deepcopy(part.state_dict()) for part in training]
    train(training, 25, 45)
    loaded = make(algorithm, seed=1)
    for i in order:
        loaded[i].load_state_dict(states[i])
    train(loaded, 25, 45)
    for first, second in zip(
        dense_momentum(*training[:2]), dense_momentum(*loaded[:2]), strict=True
    ):
        assert torch.equal(first, second)
    assert torch.equal(training[0][0].values, loaded[0][0].values)


@pytest.mark.parametrize("with_values", [False, True])
def test_momentum_follows_set_pattern(with_values):
    training = model, optimizer, _ = make()
    train(training, 0, 5)
    before = dense_momentum(model, optimizer)
    pattern = model[0].pattern
    new = ds.SparsePattern.random(pattern.shape, nnz=pattern.nnz)
    model[0].set_pattern(new, torch.zeros(new.nnz) if with_values else None)
    begin_step(*training)
    check_followed(before, dense_momentum(model, optimizer))


def test_deepr_takes_the_signs_of_loaded_weights():
    model, optimizer, trainer = make("DeepR", update_interval=1)
    state = model.state_dict()
    state["0.values"] = torch.randn(len(state["0.values"]))
    model.load_state_dict(state)
    optimizer.param_groups[0]["lr"] = 0.0
    train((model, optimizer, trainer), 0, 1)
    assert torch.equal(trainer.signs["0"], state["0.values"].sign().to(torch.int8))
    assert torch.equal(model[0].pattern.cols, state["0.cols"])


def test_topkast_chooses_again_among_loaded_weights():
    training = model, *_ = make("TopKAST", update_interval=4)
    train(training, 0, 12)
    state, output = copy.deepcopy(model.state_dict()), model(X).detach()
    train(training, 12, 41)
    model.load_state_dict(state)
    begin_step(*training)
    torch.testing.assert_close(model(X), output)


def test_storing_without_the_active_set_warns(tmp_path):
    training = model, _, trainer = make("TopKAST", update_interval=4)
    train(training, 0, 12)
    for store in (
        lambda: ds.save_safetensors(model, tmp_path / "file"),
        lambda: ds.densify(copy.deepcopy(model)),
    ):
        with pytest.warns(UserWarning, match=r"layer '0' computes with a part .* shrink\(\) first"):
            store()
    trainer.shrink()
    output = model(X)
    torch.testing.assert_close(ds.densify(copy.deepcopy(model))(X), output)
