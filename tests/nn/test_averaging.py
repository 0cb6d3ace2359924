"""Averaged models with changing patterns equal masked averages of masked dense models."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dynsparse as ds
from dynsparse.nn import SparseLinear, follow_patterns
from dynsparse.nn.copies import Snapshot

DECAY = 0.8


def model(block_size=1):
    torch.manual_seed(3)
    return nn.Sequential(
        SparseLinear(12, 16, 0.4, block_size), nn.ReLU(), SparseLinear(16, 8, 0.5, block_size)
    ).double()


@pytest.mark.parametrize("method", [ds.RigL, ds.SET, ds.GMP])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("own", [False, True])
def test_average_equals_masked_dense_average(own, block_size, method):
    net = model(block_size)
    if own:
        averaged = copy.deepcopy(net)
        follow_patterns(averaged, net)
    else:
        averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
        averaged.update_parameters(net)  # the first call copies
    layers = {0: net[0], 2: net[2]}
    dense = {i: layer.to_dense().detach().clone() for i, layer in layers.items()}
    options = {"final_density": 0.2} if method is ds.GMP else {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    trainer = method(net, optimizer, total_steps=24, update_interval=2, **options)
    changed = 0
    for _ in range(20):
        net(torch.randn(9, 12).double()).square().mean().backward()
        changed += trainer.step() is not None
        optimizer.zero_grad()
        if own:
            with torch.no_grad():
                for mine, theirs in zip(averaged.parameters(), net.parameters(), strict=True):
                    mine.lerp_(theirs, 1 - DECAY)
        else:
            averaged.update_parameters(net)
        module = averaged if own else averaged.module
        for i, layer in layers.items():
            weight = layer.to_dense().detach()
            dense[i] = (DECAY * dense[i] * layer.pattern.to_mask()) + (1 - DECAY) * weight
            assert module[i].pattern == layer.pattern
            torch.testing.assert_close(module[i].to_dense().detach(), dense[i])
    assert changed >= 3


def test_plain_copies_keep_their_pattern():
    net = model()
    snapshot, before = copy.deepcopy(net), net[0].pattern
    averaged = AveragedModel(net)
    other = ds.SparsePattern.random(before.shape, nnz=before.nnz)
    net[0].set_pattern(other)
    assert snapshot[0].pattern == before
    assert averaged.module[0].pattern == other
    again = copy.deepcopy(averaged)
    net[0].set_pattern(before)
    assert again.module[0].pattern == other
    del averaged
    net[0].set_pattern(other)


MAKERS = [
    "timm/utils/model_ema.py",
    "ema_pytorch/ema_pytorch.py",
    "ema_pytorch/post_hoc_ema.py",
    "ignite/handlers/ema_handler.py",
    "ultralytics/utils/torch_utils.py",
    "mmengine/model/averaged_model.py",
    "opacus/grad_sample/functorch.py",
]


def copy_in(file, module):
    """A deep copy by code of this file."""
    names = {"copy": copy}
    exec(
        compile("def make(module):\n    return copy.deepcopy(module)", f"/lib/{file}", "exec"),
        names,
    )
    return names["make"](module)


@pytest.mark.parametrize("file", MAKERS)
def test_copies_of_libraries_follow(file):
    net = model()
    average = copy_in(file, net)
    other = ds.SparsePattern.random(net[0].pattern.shape, nnz=net[0].pattern.nnz)
    net[0].set_pattern(other)
    assert average[0].pattern == other


def test_gradients_per_sample_after_updates():
    """As Opacus computes them: with a copy of each layer on the meta device."""
    layer = model()[0]
    base = copy_in("opacus/grad_sample/functorch.py", layer).to("meta")
    optimizer = torch.optim.SGD([*layer.parameters()], lr=0.1)
    trainer = ds.SET(layer, optimizer, total_steps=10, update_interval=1, seed=0)
    for _ in range(3):
        x = torch.randn(5, 12).double()

        def loss(parameters, x):
            return torch.func.functional_call(base, parameters, (x,)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
        found = per_sample(dict(layer.named_parameters()), x)
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        torch.testing.assert_close(found["values"].sum(0), layer.values.grad)
        assert trainer.step() is not None


def test_different_models_raise():
    net = model()
    with pytest.raises(ValueError, match="is only in one"):
        follow_patterns(net[:2], net)
    other = copy.deepcopy(net)
    other[0].set_pattern(ds.SparsePattern.random((16, 12), nnz=net[0].pattern.nnz))
    with pytest.raises(ValueError, match="'0' must begin with the same pattern"):
        follow_patterns(other, net)


def average_of(net):
    return copy.deepcopy(net).requires_grad_(False)


def change(net):
    before = net[0].pattern
    net[0].set_pattern(ds.SparsePattern.random(before.shape, nnz=before.nnz))


def _by_state(average, net):
    for name, tensor in average.state_dict().items():
        if tensor.is_floating_point():
            tensor.lerp_(net.state_dict()[name], 0.1)


def _by_parameters(average, net):
    for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
        mine.lerp_(theirs + 1, 0.1)


def _by_data(average, net):
    for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data + 1, alpha=0.1)


@pytest.mark.parametrize("write", [_by_state, _by_parameters, _by_data])
def test_average_that_does_not_follow_warns(write):
    net = model()
    average = average_of(net)
    with torch.no_grad():
        write(average, net)
    with pytest.warns(UserWarning, match=r"call dynsparse\.nn\.follow_patterns\(copy, model\)"):
        change(net)
    change(net)  # once for each


def _of_a_copy(net):
    return copy.deepcopy(average_of(net)).half()


def _trained(net):
    with torch.no_grad():
        (trained := copy.deepcopy(net))[0].values.add_(1)
    return trained


def _loaded(net):
    with torch.no_grad():
        net[0].values.add_(1)
        (target := average_of(net)).load_state_dict(net.state_dict())
        net[0].values.add_(1)
        target.load_state_dict(net.state_dict())
    return target


def _of_another_pattern(net):
    change(other := average_of(net))
    other[0].values.add_(1)
    return other


def _following(net):
    follow_patterns(average := average_of(net), net)
    average[0].values.add_(1)
    return average


@pytest.mark.parametrize(
    "make", [average_of, _of_a_copy, _trained, _loaded, _of_another_pattern, _following]
)
def test_other_copies_do_not_warn(make):
    net = model()
    other = make(net)
    for _ in range(3):
        change(net)
        with torch.no_grad():
            if other[0].pattern == net[0].pattern or make is _of_another_pattern:
                other[0].values.add_(1)
    assert other[0].values is not net[0].values


def _copy_with_gradients(net):
    return net, copy.deepcopy(net)


def _loaded_copy(net):
    other = nn.Sequential(SparseLinear(12, 16, 0.4), nn.ReLU(), SparseLinear(16, 8, 0.5)).double()
    other.load_state_dict(net.state_dict())
    return net, other


def _frozen_loaded_copy(net):
    return net, _loaded_copy(net)[1].requires_grad_(False)


def _trained_copy(net):
    return copy.deepcopy(net), net


def _copies(net):
    return copy.deepcopy(net), copy.deepcopy(net).requires_grad_(False)


def _unpickled(net):
    return pickle.loads(pickle.dumps((net, average_of(net))))


@pytest.mark.parametrize(
    "make",
    [
        _copy_with_gradients,
        _loaded_copy,
        _frozen_loaded_copy,
        _trained_copy,
        _copies,
        _unpickled,
    ],
)
def test_target_network_warns(make):
    """Soft updates of what is no frozen deep copy of the trained model: by the second update."""
    net, target = make(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = ds.RigL(net, optimizer, total_steps=20, update_interval=2)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(6, 12, dtype=torch.float64)).square().mean().backward()
            trainer.step()
            with torch.no_grad():
                _by_data(target, net)

    with pytest.warns(UserWarning, match="or a target network"):
        train(4)
    train(4)  # once for each layer
    assert trainer.updates == 4


@pytest.mark.parametrize("compiled", [False, True])
def test_copies_that_are_trained_do_not_warn(compiled):
    """Copies that a plain optimizer trains, or a trainer of their own."""
    net = model()
    others = [copy.deepcopy(net) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, *others)]
    trainers = [
        ds.RigL(net, optimizers[0], total_steps=40, update_interval=2),
        ds.SET(others[0], optimizers[1], total_steps=40, update_interval=3),
    ]
    run = torch.compile(others[1], backend="aot_eager") if compiled else others[1]
    for _ in range(12):
        for m in (net, others[0], run):
            m(torch.randn(6, 12, dtype=torch.float64)).square().mean().backward()
        for step in (trainers[0].step, trainers[1].step, optimizers[2].step):
            step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert [trainer.updates for trainer in trainers] == [6, 4]


def test_copy_without_values_does_not_matter():
    net = model()
    other = copy.deepcopy(net)
    del other[0]._parameters["values"]
    change(net)
    other[2].values = None
    change(net)


def test_shared_memory_warns():
    net = model().share_memory()
    with pytest.warns(UserWarning, match="memory that processes share"):
        change(net)
    change(net)  # it is not shared any more


def test_shallow_copy_of_a_layer_raises_after_a_change():
    net = model()
    other = copy.copy(net[0])
    change(net)
    for call in (other.to_dense, other.state_dict):
        with pytest.raises(RuntimeError, match="values of another sparse layer"):
            call()


def test_copies_on_devices_are_compared_without_waiting():
    layer = model()[0]
    before = layer.values.detach().clone()
    snapshot = Snapshot(layer.values)
    assert [snapshot._differs_by_now(before, before) for _ in range(2)] == [False, False]
    assert [snapshot._differs_by_now(before + 1, before) for _ in range(2)] == [False, True]
    snapshot = Snapshot(layer.to("meta").values)
    assert not snapshot.is_written(layer.values)


def test_copies_in_inference_mode():
    with torch.inference_mode():
        net = model()
        other = copy.deepcopy(net)
        change(net)
    assert other[0].pattern != net[0].pattern


def test_average_of_whole_states_names_the_way():
    """The loop of PyTorch's DQN tutorial averages rows and cols, too."""
    net = model()
    target = copy.deepcopy(net)
    own, state = target.state_dict(), net.state_dict()
    mixed = {name: 0.1 * state[name] + 0.9 * own[name] for name in own}
    with pytest.raises(RuntimeError, match="if the state is an average of two states"):
        target.load_state_dict(mixed)


def test_target_that_loads_the_state_collects_no_hooks():
    net = model()
    target = copy.deepcopy(net)
    for _ in range(5):
        change(net)
        target.load_state_dict(net.state_dict())
        assert target[0].pattern is net[0].pattern
    change(net)
    hooks = target[0].values._post_accumulate_grad_hooks
    assert len(hooks) == 1
    follow_patterns(target := copy.deepcopy(net), net)
    change(net)
    assert not target[0].values._post_accumulate_grad_hooks


def test_values_that_are_no_leaf_do_not_matter():
    net = model()
    other = copy.deepcopy(net)
    values = other[0].values
    del other[0]._parameters["values"]
    other[0].values = values * 2
    other[2]._parameters["values"] = other[2].values * 2
    for _ in range(3):
        change(net)
        net[2].set_pattern(net[2].pattern)


def test_average_of_another_holder_does_not_warn():
    """Two models of one pattern, of which the second has an average that follows."""
    nets = [model(), model()]
    nets[1].load_state_dict(nets[0].state_dict())
    averaged = AveragedModel(nets[1])
    for _ in range(3):
        change(nets[0])
        nets[1](torch.randn(4, 12).double()).sum().backward()
        with torch.no_grad():
            for values in nets[1].parameters():
                values.sub_(values.grad)
        averaged.update_parameters(nets[1])
