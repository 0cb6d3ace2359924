"""Features of torch for all modules work with sparse layers or raise a one-line error."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize, prune

import dynsparse as ds

LAST = torch.channels_last


def network():
    return nn.Sequential(ds.nn.SparseLinear(12, 20, 0.3), nn.ReLU(), ds.nn.SparseLinear(20, 4, 0.3))


def train(model, trainer, steps, features=12):
    for _ in range(steps):
        trainer.optimizer.zero_grad()
        model(torch.randn(8, features, dtype=model[0].values.dtype)).square().mean().backward()
        trainer.step()


# ---- ensembles ----


def ensemble(models, x):
    parameters, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    return vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), (0, 0, None))(
        parameters, buffers, x
    )


def test_stacked_models_with_one_pattern():
    models = [network() for _ in range(3)]
    for model in models[1:]:
        for own, first in zip(model, models[0], strict=True):
            if isinstance(own, ds.nn.SparseLinear):
                own.set_pattern(first.pattern, torch.randn_like(own.values))
    x = torch.randn(5, 12)
    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(ensemble(models, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [1, 4])
def test_stacked_models_with_several_patterns_raise(block_size):
    models = [nn.Sequential(ds.nn.SparseLinear(12, 20, 0.3, block_size)) for _ in range(3)]
    with pytest.raises(RuntimeError, match="layers with different patterns were stacked"):
        ensemble(models, torch.randn(5, 12))


def test_stacked_models_with_constant_values():
    models = [network() for _ in range(2)]
    for model in models:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    values = {name: p.detach().expand(3, *p.shape) for name, p in models[0].named_parameters()}
    x = torch.randn(5, 12)
    y = vmap(lambda p: functional_call(models[0], p, (x,)))(values)
    torch.testing.assert_close(y, models[0](x).expand(3, 5, 4))


# ---- state dicts ----


@pytest.fixture
def group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "DDP": nn.parallel.DistributedDataParallel,
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_distributed_checkpoint_state_dicts(group, kind):
    model, other = network(), network()
    for source, target in ((model, other), (other, model)):
        nn.init.uniform_(source[0].bias)
        state = get_model_state_dict(WRAPPERS[kind](source))
        assert set(state) == set(model.state_dict())
        set_model_state_dict(WRAPPERS[kind](target), copy.deepcopy(state))
        x = torch.randn(5, 12)
        assert torch.equal(target(x), source(x))
        assert target[0].pattern == source[0].pattern
    assert not list(model.buffers())
    assert not list(model[0].named_buffers(recurse=False))


def test_dense_state_dict_raises_with_advice():
    dense = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model = ds.sparsify(copy.deepcopy(dense), 0.3, verbose=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"0\.weight is that of a dense layer, .*sparsify"):
        model.load_state_dict(dense.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        dense.load_state_dict(model.state_dict())
    assert torch.equal(ds.densify(model)[0].bias, dense[0].bias)
    dense.load_state_dict(model.state_dict())


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_conversion_with_swap_tensors(swapping):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    trainer = ds.RigL(model, optimizer, total_steps=100, update_interval=3)
    train(model, trainer, 4)
    values, dense = model[0].values, model[0].to_dense().detach()
    optimizer.zero_grad()
    train(model, trainer, 1)
    dense = model[0].to_dense().detach()
    model.to(torch.float64)
    assert model[0].values is values
    assert torch.equal(model[0].to_dense(), dense.double())
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    x = torch.randn(3, 12, dtype=torch.float64)
    torch.testing.assert_close(model[0](x), x @ model[0].to_dense().t() + model[0].bias)
    model.float()
    for state in optimizer.state.values():
        state.update({k: t.float() for k, t in state.items() if t.dim()})
    train(model, trainer, 6)
    assert trainer.updates == 3


# ---- memory formats ----


def test_convolutions_in_channels_last():
    dense = nn.Conv2d(3, 8, 3, padding=1)
    layer = ds.nn.SparseConv2d(3, 8, 3, padding=1, density=0.3)
    x = torch.randn(2, 3, 8, 8)
    expected = layer(x)
    assert expected.is_contiguous()
    for module in (dense, layer):
        module.to(memory_format=LAST)
        assert module(x).is_contiguous(memory_format=LAST)
    torch.testing.assert_close(layer(x), expected)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.double().float()):
        assert other(x).is_contiguous(memory_format=LAST)
    assert ds.densify(nn.Sequential(layer))[0].weight.is_contiguous(memory_format=LAST)
    model = ds.sparsify(nn.Sequential(dense), 0.3, verbose=False)
    assert model(x).is_contiguous(memory_format=LAST)
    model.to(memory_format=torch.contiguous_format)
    assert model(x).is_contiguous()


# ---- refused ----


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated", "ignore:a computation uses")
@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    ],
)
def test_changing_a_dense_weight_raises(change):
    layer = ds.nn.SparseLinear(16, 8, 0.3)
    x = torch.randn(4, 16)
    expected = layer(x)
    with pytest.raises((KeyError, TypeError, ValueError), match="weight"):
        change(layer)
    assert torch.equal(layer(x), expected)


def test_muon_rejects_sparse_values():
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        torch.optim.Muon(ds.nn.SparseLinear(16, 8, 0.3, bias=False).parameters())
