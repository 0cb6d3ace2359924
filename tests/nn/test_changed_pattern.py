"""Programs, graphs and weights of an earlier pattern raise if used with the current values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import dynsparse as ds
from dynsparse.ops import capture


def _layer(seed: int = 0, **options) -> ds.nn.SparseLinear:
    generator = torch.Generator().manual_seed(seed)
    return ds.nn.SparseLinear(16, 16, density=0.25, generator=generator, **options)


def _other_pattern(layer, seed: int = 7) -> ds.SparsePattern:
    generator = torch.Generator().manual_seed(seed)
    pattern = layer.pattern
    return ds.SparsePattern.random(
        pattern.shape, density=0.25, block_size=pattern.block_size, generator=generator
    )


PROGRAMS = {
    "export": lambda layer, x: torch.export.export(layer, (x,)).module(),
    "trace": lambda layer, x: torch.jit.trace(layer, (x,), check_trace=False),
}


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit")
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (_layer, torch.randn(4, 16)),
        (lambda: _layer(block_size=4), torch.randn(4, 16)),
        (lambda: ds.nn.SparseConv2d(4, 8, 3, density=0.3), torch.randn(2, 4, 6, 6)),
        (lambda: ds.nn.SparseEmbedding(16, 8, density=0.3), torch.arange(4)),
    ],
    ids=["linear", "blocks", "conv", "embedding"],
)
def test_program_of_an_earlier_pattern_raises(kind, make, x):
    layer = make()
    program = PROGRAMS[kind](layer, x)
    with torch.no_grad():
        torch.testing.assert_close(program(x), layer(x))
        # New values of the same pattern are the program's, too.
        layer.values.mul_(2.0)
        layer.load_state_dict(copy.deepcopy(layer.state_dict()))
        torch.testing.assert_close(program(x), layer(x))
        generator = torch.Generator().manual_seed(7)
        own = layer.pattern
        layer.set_pattern(
            ds.SparsePattern.random(
                own.shape, nnz=own.nnz, block_size=own.block_size, generator=generator
            )
        )
        with pytest.raises(RuntimeError, match="export or trace the model again"):
            program(x)


def _recompute(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def _offload(layer, x):
    with torch.autograd.graph.save_on_cpu():
        return layer(x)


@pytest.mark.parametrize("forward", [_recompute, _offload])
@pytest.mark.parametrize("x_requires_grad", [True, False])
def test_backward_after_an_update_raises(forward, x_requires_grad):
    layer = _layer()
    y = forward(layer, torch.randn(4, 16, requires_grad=x_requires_grad))
    layer.set_pattern(_other_pattern(layer))
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        y.sum().backward()
    assert layer.values.grad is None
    # What comes after is as ever.
    forward(layer, torch.randn(4, 16)).sum().backward()
    assert layer.values.grad is not None


def test_backward_with_the_earlier_index_and_other_values():
    """Values that are not the layer's still work with the layer's earlier index."""
    layer = _layer()
    index, values = layer.index, layer.values.detach().clone().requires_grad_()
    layer.set_pattern(_other_pattern(layer))
    x = torch.randn(4, 16)
    ds.ops.linear.linear(x, values, index).sum().backward()
    assert values.grad is not None


def test_dense_weight_from_before_an_update_has_no_gradient():
    layer = _layer()
    dense = layer.to_dense()
    layer.set_pattern(_other_pattern(layer))
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        dense.sum().backward()
    layer.to_dense().sum().backward()
    torch.testing.assert_close(layer.values.grad, torch.ones_like(layer.values))


def test_values_of_another_layer_require_its_pattern():
    one, other = _layer(0), _layer(1)
    x = torch.randn(4, 16)
    expected = other(x)
    with pytest.raises(RuntimeError, match="values of another sparse layer"):
        functional_call(one, dict(other.named_parameters()), (x,))
    torch.testing.assert_close(functional_call(one, other.state_dict(), (x,)), expected)
    # The layer itself has stayed as it was, and one of the same pattern takes the values.
    alike = copy.deepcopy(other)
    parameters = dict(other.named_parameters())
    torch.testing.assert_close(functional_call(alike, parameters, (x,)), expected)
    assert torch.equal(one(x), copy.deepcopy(one)(x))


CALLS = {
    "Parameters": lambda f, p, x: f(p, x),
    "detached": lambda f, p, x: f({n: v.detach() for n, v in p.items()}, x),
    "inference": torch.no_grad()(lambda f, p, x: f({n: v.detach() for n, v in p.items()}, x)),
    "grad": lambda f, p, x: grad(lambda p: f(p, x).square().sum())(p)["values"],
    "vmap(grad)": lambda f, p, x: vmap(grad(lambda p, x: f(p, x).sum()), (None, 0))(p, x)["values"],
}
KINDS = {
    "linear": (lambda: _layer(0), lambda: torch.randn(4, 16)),
    "conv": (lambda: ds.nn.SparseConv2d(4, 8, 3, density=0.25), lambda: torch.randn(2, 4, 6, 6)),
    "embedding": (lambda: ds.nn.SparseEmbedding(20, 8, 0.25), lambda: torch.arange(7)),
}


@pytest.mark.parametrize(
    ("kind", "call"),
    [(k, c) for k in KINDS for c in CALLS if k == "linear" or "grad" not in c],
)
def test_copies_with_an_earlier_pattern_refuse_the_values(kind, call):
    make, sample = KINDS[kind]
    layer, x = make(), sample()
    earlier = copy.deepcopy(layer)
    layer.set_pattern(_other_pattern(layer))
    now, parameters = copy.deepcopy(layer), dict(layer.named_parameters())

    def compute(module):
        return CALLS[call](lambda p, x: functional_call(module, p, (x,)), parameters, x)

    for refused in (earlier, copy.deepcopy(earlier).to("meta")):
        with pytest.raises(RuntimeError, match="values of another sparse layer"):
            compute(refused)
    # A call that was refused leaves nothing behind that lets the next one pass.
    functional_call(earlier, copy.deepcopy(earlier).state_dict(), (x,))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="values of another sparse layer"):
            compute(earlier)
    with pytest.raises(RuntimeError, match="values of another sparse layer"):
        functional_call(earlier, parameters, (x,))
    # The layer itself and copies with its pattern compute, and the earlier one with other values.
    torch.testing.assert_close(compute(now), compute(layer))
    parameters = {n: p.detach().clone() for n, p in parameters.items()}
    compute(earlier)


def test_setting_the_same_pattern_keeps_the_capture():
    layer = _layer()
    pairs = capture.start(layer.index.row_ptr, layer.values)
    layer(torch.randn(4, 16)).sum().backward()
    layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert len(pairs) == 1
    assert capture.is_open(layer.index.row_ptr)


def test_pickle_is_consistent_during_an_update():
    """The pattern changes after pickle has read the layer's state and before it reads values."""
    layer = _layer()
    dense = layer.to_dense().detach().clone()
    rebuild, arguments, state = layer.__reduce_ex__(4)[:3]
    with torch.no_grad():
        layer.set_pattern(_other_pattern(layer), torch.randn_like(layer.values))
    state = pickle.loads(pickle.dumps(state))
    made = rebuild(*arguments)
    made.__setstate__(state)
    assert torch.equal(made.to_dense(), dense)
    assert isinstance(made.values, torch.nn.Parameter)
