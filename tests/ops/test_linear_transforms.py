"""Higher-order derivatives and torch.func: the sparse layer equals the dense one."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.functional import linear as dense_linear

import dynsparse as ds
import popsparse
from dynsparse import SparsePattern
from dynsparse.nn import SparseEmbedding, SparseLinear
from dynsparse.nn.active_set import ActiveSet
from dynsparse.ops import capture
from dynsparse.ops.linear import grad_input, grad_weight, linear

BLOCKS = pytest.mark.parametrize("block", [1, 2])


def make(block, lead=(3,)):
    pattern = SparsePattern.random((3 * block, 4 * block), 0.5, block_size=block)
    x = torch.randn(*lead, pattern.shape[1], dtype=torch.float64)
    values = torch.randn(pattern.values_shape, dtype=torch.float64)
    bias = torch.randn(pattern.shape[0], dtype=torch.float64)
    return pattern, x, values, bias


def both(pattern):
    """Return f(x, values, bias) by the sparse operator and by a dense product."""

    def sparse(x, values, bias):
        return linear(x, values, pattern, bias).sin()

    def dense(x, values, bias):
        return dense_linear(x, pattern.to_dense(values), bias).sin()

    return sparse, dense


def scalar(function):
    return lambda *operands: function(*operands).square().sum()


@BLOCKS
def test_second_derivatives(block):
    pattern, *operands = make(block, (2,))
    operands = [t.requires_grad_() for t in operands]
    sparse, _ = both(pattern)
    assert torch.autograd.gradgradcheck(sparse, operands)
    x, values, _ = operands
    dy = torch.randn(2, pattern.shape[0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda dy, v: grad_input(dy, v, pattern), (dy, values))
    assert torch.autograd.gradcheck(lambda dy, x: grad_weight(dy, x, values, pattern), (dy, x))
    only_x = linear(x, values.detach(), pattern)
    (first,) = torch.autograd.grad(only_x.sin().sum(), x, create_graph=True)
    first.square().sum().backward()
    assert values.grad is None
    assert x.grad.abs().sum() > 0


@BLOCKS
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_vjp_and_jvp(block, lead):
    pattern, *operands = make(block, lead)
    sparse, dense = both(pattern)
    tangents = tuple(torch.randn_like(t) for t in operands)
    for which in (0, 1, 2, (0, 1, 2)):
        mine, other = (grad(scalar(f), which)(*operands) for f in (sparse, dense))
        torch.testing.assert_close(mine, other)
    mine, other = (jvp(f, tuple(operands), tangents) for f in (sparse, dense))
    torch.testing.assert_close(mine, other)
    dy = torch.randn_like(other[0])
    torch.testing.assert_close(*(vjp(f, *operands)[1](dy) for f in (sparse, dense)))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(operands[0], tangents[0])
        found = [
            torch.autograd.forward_ad.unpack_dual(f(dual, *operands[1:])) for f in both(pattern)
        ]
    torch.testing.assert_close(found[0].tangent, found[1].tangent)


@BLOCKS
@pytest.mark.parametrize(
    "transform", [jacrev, jacfwd, hessian, lambda f, w: jacrev(jacrev(f, w), w)]
)
@pytest.mark.parametrize("which", [0, 1])
def test_jacobians_and_hessians(block, transform, which):
    pattern, *operands = make(block, (2,))
    sparse, dense = both(pattern)
    a, b = (transform(scalar(f), which)(*operands) for f in (sparse, dense))
    torch.testing.assert_close(a, b)


@BLOCKS
@pytest.mark.parametrize(
    "dims",
    [(0, None, None), (1, None, None), (None, 0, None), (0, 0, 0), (None, None, 0), (-1, 0, None)],
)
def test_vmap(block, dims):
    pattern, x, values, bias = make(block, (2,))
    sparse, dense = both(pattern)
    operands = [
        t if dim is None else torch.stack([t, 2 * t, t + 1], dim)
        for t, dim in zip((x, values, bias), dims, strict=True)
    ]
    torch.testing.assert_close(*(vmap(f, dims)(*operands) for f in (sparse, dense)))
    a, b = (vmap(grad(scalar(f), (0, 1, 2)), dims)(*operands) for f in (sparse, dense))
    torch.testing.assert_close(a, b)


def test_per_sample_gradients_of_a_model():
    m = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4)).double()
    ds.sparsify(m, 0.4, verbose=False)
    parameters = {name: p.detach() for name, p in m.named_parameters()}
    x, y = torch.randn(5, 8).double(), torch.randint(4, (5,))

    def loss(parameters, x, y):
        return nn.functional.cross_entropy(functional_call(m, parameters, (x[None],)), y[None])

    found = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    for i in range(5):
        m.zero_grad()
        nn.functional.cross_entropy(m(x[i : i + 1]), y[i : i + 1]).backward()
        for name, parameter in m.named_parameters():
            torch.testing.assert_close(found[name][i], parameter.grad)


def test_stacked_models():
    first = SparseLinear(8, 6, 0.5)
    second = SparseLinear(8, 6, pattern=first.pattern)
    together = {
        name: torch.stack([dict(layer.named_parameters())[name] for layer in (first, second)])
        for name in ("values", "bias")
    }
    x = torch.randn(3, 8)
    found = vmap(lambda p: functional_call(first, p, (x,)))(together)
    torch.testing.assert_close(found, torch.stack([first(x), second(x)]))


def test_growth_sees_the_full_gradient_of_a_penalty():
    pattern, x, values, _ = make(1)
    values = values.requires_grad_()
    dense = pattern.to_dense(values.detach()).requires_grad_()

    def penalty(weight_of_x):
        x_ = x.clone().requires_grad_()
        y = weight_of_x(x_).sin()
        (g,) = torch.autograd.grad(y.sum(), x_, create_graph=True)
        return y.square().sum() + g.square().sum()

    pairs = capture.start(pattern.index.row_ptr, values)
    loss = penalty(lambda x: linear(x, values, pattern))
    loss.backward()
    penalty(lambda x: dense_linear(x, dense)).backward()
    torch.testing.assert_close(values.grad.detach(), pattern.values_of(dense.grad))
    seen = sum(dy.t() @ x for x, dy in pairs)
    torch.testing.assert_close(seen, dense.grad)


def test_transforms_are_not_captured():
    pattern, x, values, _ = make(1)
    pairs = capture.start(pattern.index.row_ptr, values.requires_grad_())
    grad(lambda v: linear(x, v, pattern).sin().sum())(values)
    assert not pairs
    linear(x, values, pattern).sum().backward()
    assert len(pairs) == 1


def test_under_autocast():
    layer = SparseLinear(8, 6, 0.5)
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = grad(lambda v: functional_call(layer, {"values": v}, (x,)).float().sum())(
            layer.values.detach()
        )
        layer(x).float().sum().backward()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, layer.values.grad, rtol=0.02, atol=0.02)


def test_transforms_without_a_rule_raise():
    active = SparseLinear(8, 6, 0.5)
    active.active = ActiveSet(active.pattern, torch.tensor([0, 3]), torch.device("cpu"))
    machine = SparseLinear(8, 6, 0.5, target=popsparse.Target(tiles=4))
    x = torch.randn(3, 8)
    for layer, name in ((active, "an active subset"), (machine, "the tile machine")):
        with pytest.raises(RuntimeError, match=f"{name} has no rule for torch.func"):
            grad(lambda x, layer=layer: layer(x).sum())(x)
        with pytest.raises(RuntimeError, match=f"{name} has no rule for torch.func"):
            vmap(layer)(x)
    table = SparseEmbedding(5, 8, 0.5)
    ids = torch.tensor([0, 3])

    def rows(values):
        return functional_call(table, {"values": values}, (ids,))

    with pytest.raises(RuntimeError, match="sparse embedding has no rule"):
        vmap(table)(ids[None])
    with pytest.raises(RuntimeError, match="sparse embedding has no rule"):
        grad(lambda v: rows(v).sum())(table.values.detach())
    with pytest.raises(RuntimeError, match="sparse embedding has no rule"):
        jvp(rows, (table.values.detach(),), (table.values.detach(),))


def test_tensor_escaped_from_its_transform():
    layer, kept = SparseLinear(4, 3, 0.5), []

    def keep(x):
        kept.append(x)
        return x.sum()

    x = torch.randn(2, 4)
    grad(keep)(x)
    torch.testing.assert_close(layer(kept[0]), layer(x))
