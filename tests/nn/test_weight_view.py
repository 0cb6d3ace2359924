"""`layer.weight`: a read-only view that avoids a dense matrix where possible."""

import copy

import pytest
import torch
from conv1d_layer import Conv1D
from torch import nn
from torch.nn.functional import linear

import dynsparse as ds
import popsparse
from dynsparse.nn import SparseLinear

DENSE = "uses the dense weight of "


def layer(**options):
    return SparseLinear(8, 6, 0.5, dtype=torch.float64, **options)


def test_metadata_needs_no_dense_matrix():
    weight = layer().weight
    assert isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.size(0), len(weight), weight.ndim) == ((6, 8), 6, 6, 2)
    assert (weight.numel(), weight.stride()) == (48, (8, 1))
    assert (weight.dtype, weight.device.type, weight.is_cuda) == (torch.float64, "cpu", False)
    assert torch.is_floating_point(weight)
    assert weight.requires_grad
    assert weight.data.dtype is torch.float64
    assert weight.grad is None
    frozen = layer()
    frozen.values.requires_grad_(False)
    assert not frozen.weight.requires_grad


@pytest.mark.parametrize("bias", [True, False])
def test_linear_with_weight_equals_the_layer(bias):
    own = layer()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    other = torch.randn(6, dtype=torch.float64, requires_grad=True) if bias else None
    y = linear(x, own.weight, other)
    dense = own.to_dense().detach().requires_grad_()
    expected = linear(x.detach().requires_grad_(), dense, other)
    torch.testing.assert_close(y, expected)
    y.sin().sum().backward()
    own_bias_grad = None if other is None else other.grad.clone()
    expected.sin().sum().backward()
    torch.testing.assert_close(own.values.grad, own.pattern.values_of(dense.grad))
    if other is not None:
        torch.testing.assert_close(2 * own_bias_grad, other.grad)


def test_growth_sees_products_with_weight():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(8, 6)

        def forward(self, x):
            return linear(x, self.part.weight, self.part.bias)

    m = ds.sparsify(Reads(), 0.3, verbose=False)
    trainer = ds.RigL(m, torch.optim.SGD(m.parameters(), 0.1), total_steps=10, update_interval=1)
    m(torch.randn(5, 8)).square().sum().backward()
    assert list(trainer.step()) == ["part"]


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.t(),
        lambda w: w.T.contiguous(),
        lambda w: torch.ones(2, 6, dtype=w.dtype) @ w,
        lambda w: w[1:3],
        lambda w: w.detach().abs().requires_grad_(),
        lambda w: torch.cat([w, w]),
        lambda w: torch.einsum("oi,oj->ij", w, w),
        lambda w: linear(w, w),
        lambda w: w.to(torch.float32),
    ],
)
def test_other_reads_use_a_dense_matrix_and_warn_once(read):
    own = layer()
    with pytest.warns(UserWarning, match=DENSE + "a SparseLinear.*use an nn.Linear in its place"):
        result = read(own.weight)
    dense = own.to_dense().detach().requires_grad_()
    expected = read(dense)
    torch.testing.assert_close(result, expected)
    result, expected = read(own.weight), read(dense)  # no warning any more, or it would fail
    result.sum().backward()
    expected.sum().backward()
    if dense.grad is not None:
        torch.testing.assert_close(own.values.grad, own.pattern.values_of(dense.grad))


@pytest.mark.parametrize(
    "write",
    [
        lambda own: nn.init.xavier_uniform_(own.weight),
        lambda own: own.weight.data.normal_(),
        lambda own: own.weight.data.__setitem__(0, 1.0),
        lambda own: own.weight.__setitem__(0, 1.0),
        lambda own: torch.add(torch.ones(6, 8), 1, out=own.weight),
        lambda own: setattr(own.weight, "data", torch.zeros(6, 8)),
        lambda own: own.weight.requires_grad_(False),
        lambda own: own.weight.data_ptr(),
        lambda own: own.weight.mul_(2),
    ],
)
def test_writing_raises(write):
    m = ds.sparsify(nn.Sequential(nn.Linear(8, 6)), 0.5, verbose=False)
    before = m[0].values.clone()
    with pytest.raises(
        RuntimeError, match=r"'0' .SparseLinear. cannot be written.*exclude=\['0'\]"
    ):
        write(m[0])
    assert torch.equal(m[0].values, before)


def test_weight_cannot_be_replaced():
    model = ds.sparsify(nn.Sequential(nn.Linear(8, 6)), 0.5, verbose=False)
    for weight in (nn.Parameter(torch.zeros(6, 8)), torch.zeros(6, 8)):
        with pytest.raises(AttributeError, match=r"the weight of '0' .* cannot be assigned"):
            model[0].weight = weight
    assert "weight" not in dict(model.named_parameters())
    assert copy.deepcopy(layer())._module_name is None


def test_disabled_torch_function_raises():
    with (
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(RuntimeError, match="the dense weight of a SparseLinear cannot be"),
    ):
        layer().weight.abs()


def test_weight_of_conv1d_is_transposed():
    m = ds.sparsify(nn.Sequential(Conv1D(6, 8)), 0.5, verbose=False)
    assert m[0].weight.shape == (8, 6)
    x = torch.randn(3, 8)
    with pytest.warns(UserWarning, match=DENSE + "'0' .SparseConv1D.*exclude=..0..\\)"):
        torch.testing.assert_close(x @ m[0].weight + m[0].bias, m(x))


def test_weight_on_the_tile_machine_is_dense():
    own = SparseLinear(8, 8, 0.5, target=popsparse.Target(tiles=4))
    x = torch.randn(2, 8)
    with pytest.warns(UserWarning, match=DENSE):
        torch.testing.assert_close(linear(x, own.weight, own.bias), own(x))


def test_compiled_code_uses_the_dense_matrix():
    own = layer()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x):
        return linear(x.to(own.weight.dtype), own.weight, own.bias)

    x = torch.randn(3, 8)
    torch.testing.assert_close(run(x), own(x.double()))
