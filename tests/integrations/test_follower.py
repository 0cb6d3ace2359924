"""A trainer that follows an external optimizer's steps equals one that takes the steps."""

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.integrations.follower import Follower
from dynsparse.nn import SparseLinear


def make(seed=0):
    g = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        SparseLinear(12, 16, 0.3, generator=g), nn.ReLU(), SparseLinear(16, 4, 0.3, generator=g)
    )
    return model, torch.optim.Adam(model.parameters(), 0.01)


def backward(model, step):
    g = torch.Generator().manual_seed(step)
    model(torch.randn(8, 12, generator=g)).square().mean().backward()


def same(first, second):
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


@pytest.mark.parametrize("algorithm", [ds.RigL, ds.SET])
def test_following_equals_stepping(algorithm):
    options = {"update_interval": 3, "drop_fraction": 0.5}
    if algorithm is ds.SET:
        options["seed"] = 5
    first, first_optimizer = make()
    trainer = algorithm(first, first_optimizer, total_steps=20, **options)
    second, second_optimizer = make()
    follower = Follower(algorithm, options)
    followed = follower.start(second, second_optimizer, 20)
    for step in range(20):
        for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
            optimizer.zero_grad()
            backward(model, step)
            if model is first:
                trainer.step()
            else:
                optimizer.step()
    same(first, second)
    assert followed.updates == trainer.updates > 2
    assert followed.schedule == trainer.schedule


def test_state_loaded_before_the_trainer_exists():
    options = {"update_interval": 2, "seed": 1, "total_steps": 20}
    whole, optimizer = make()
    follower = Follower(ds.SET, options)
    assert follower.state_dict() is None
    follower.start(whole, optimizer, 99)
    for step in range(10):
        optimizer.zero_grad()
        backward(whole, step)
        optimizer.step()
        if step == 4:
            saved = follower.state_dict()
            model_state = {k: v.clone() for k, v in whole.state_dict().items()}
            optimizer_state = torch.optim.Adam(whole.parameters()).state_dict()
            optimizer_state["state"] = {
                k: {n: t.clone() for n, t in v.items()}
                for k, v in optimizer.state_dict()["state"].items()
            }
            optimizer_state["param_groups"] = optimizer.state_dict()["param_groups"]
    resumed, optimizer = make(seed=9)
    other = Follower(ds.SET, options)
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    resumed.load_state_dict(model_state)
    other.start(resumed, optimizer, 99)
    optimizer.load_state_dict(optimizer_state)
    for step in range(5, 10):
        optimizer.zero_grad()
        backward(resumed, step)
        optimizer.step()
    same(whole, resumed)


def test_stop_ends_updates():
    model, optimizer = make()
    follower = Follower(ds.SET, {"update_interval": 1})
    trainer = follower.start(model, optimizer, 20)
    again = follower.start(model, optimizer, 20)
    backward(model, 0)
    optimizer.step()
    assert (trainer.steps, again.steps) == (0, 1)
    follower.stop()
    optimizer.step()
    assert again.steps == 1
    assert follower.trainer is again


def test_wrong_algorithms_raise():
    with pytest.raises(TypeError, match=r"expected an algorithm such as dynsparse\.RigL"):
        Follower("rigl", {})
    model, optimizer = make()
    with pytest.raises(TypeError, match="the algorithm must return a trainer"):
        Follower(lambda model, optimizer: model, {}).start(model, optimizer, 3)
    assert Follower(ds.Static, {}).start(model, optimizer, 3).updates == 0
    with pytest.raises(ValueError, match="the model has no sparse layers"):
        Follower(ds.Static, {}).start(nn.Linear(2, 2), optimizer, 3)
