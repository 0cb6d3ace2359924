"""Dense products off the CPU: results checked on the CPU, host waits on fake tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from product_checks import shuffle_slots
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear as dense_linear
from torch.utils._python_dispatch import TorchDispatchMode

from dynsparse import SparsePattern, ops
from dynsparse.nn import SparseConv2d, SparseLinear
from dynsparse.ops import capture
from dynsparse.ops.linear import LayerIndex, naive
from dynsparse.ops.linear.cuda import dense
from dynsparse.pattern import PatternIndex

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(got, wanted, dtype):
    scale = float(wanted.abs().max()) if wanted.numel() else 1.0
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[dtype] * max(1, scale))


def check_passes(out, in_features, density, b, batch, dtype, masters=False, strided=False):
    pattern = SparsePattern.random((out * b, in_features * b), density, block_size=b)
    if strided:
        pattern = shuffle_slots(pattern, torch.default_generator)
    step = 2 if strided else 1
    x = torch.randn(batch, in_features * b * step).to(dtype)[:, ::step]
    dy = torch.randn(out * b, batch).to(dtype).t()
    values = torch.randn(pattern.values_shape).to(torch.float32 if masters else dtype)
    bias = torch.randn(out * b).to(values.dtype)
    p = LayerIndex(pattern.index, values)
    wide = (x.double(), values.double(), pattern.index)
    y = dense.forward(x, values, p, bias)
    assert y.dtype is dtype
    close(y, naive.forward(*wide, bias.double()), dtype)
    wanted = (
        naive.grad_input(dy.double(), values.double(), pattern.index),
        naive.grad_weight(dy.double(), *wide),
    )
    for needs in ((True, True), (True, False), (False, True)):
        got = dense.backward(dy, x, values, p, *needs)
        for need, tensor, target, own in zip(needs, got, wanted, (dy, values), strict=True):
            assert (tensor is not None) == need
            if tensor is not None:
                assert tensor.dtype is own.dtype
                close(tensor, target, dtype)


def spy(function, seen):
    return lambda *args: seen.append(args) or function(*args)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(0, 9),
    st.sampled_from([*TOLERANCE]),
    st.booleans(),
    st.booleans(),
)
def test_passes(out, in_features, density, b, batch, dtype, masters, strided):
    masters = masters and dtype in (torch.bfloat16, torch.float16)
    check_passes(out, in_features, density, b, batch, dtype, masters, strided)


@pytest.mark.parametrize("b", [32, 64, 128])
def test_large_blocks(b):
    check_passes(3, 2, 0.5, b, 7, torch.float32)


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_the_gradient_in_panels(monkeypatch, b, rows):
    monkeypatch.setattr(dense, "PANEL_BYTES", rows * 4 * 5 * b * b + 1)
    check_passes(7, 5, 0.4, b, 6, torch.float32)
    check_passes(7, 5, 0.4, b, 6, torch.bfloat16, masters=True)


@pytest.mark.parametrize("dtype", [*TOLERANCE])
@pytest.mark.parametrize("b", [1, 4])
def test_layer_computes_in_the_dtype_of_its_activations(off_cpu, monkeypatch, dtype, b):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    layer = SparseLinear(48, 32, 0.3, b, dtype=wide)
    assert layer.kernel(6, dtype=dtype) == layer.kernel(6, backward=True, dtype=dtype) == "dense"
    x = torch.randn(2, 3, 48).to(dtype).requires_grad_()
    seen = []
    for name in ("linear", "_product"):
        monkeypatch.setattr(dense, name, spy(getattr(dense, name), seen))
    y = layer(x)
    y.sum().backward()
    assert len(seen) == 2
    assert {t.dtype for args in seen for t in args[:2]} == {dtype}
    weight = layer.to_dense().detach().double().requires_grad_()
    leaf = x.detach().double().requires_grad_()
    reference = dense_linear(leaf, weight, layer.bias.detach().double())
    reference.sum().backward()
    close(y.detach(), reference.detach(), dtype)
    close(x.grad, leaf.grad, dtype)
    close(layer.values.grad, layer.pattern.values_of(weight.grad), dtype)
    assert layer.values.grad.dtype == wide


def test_dispatcher_gives_the_same_bits(off_cpu):
    layer = SparseLinear(48, 32, 0.3, 4)
    x, dy = torch.randn(5, 48), torch.randn(5, 32)
    short = layer(x)
    with torch._C._DisableTorchDispatch(), torch.autocast("cpu", enabled=False):
        index = layer.index
        long = torch.ops.dynsparse.linear(x, layer.values, *index, layer.bias)
    assert torch.equal(short, long)
    grads = torch.autograd.grad(short, (layer.values, layer.bias), dy)
    others = torch.autograd.grad(long, (layer.values, layer.bias), dy)
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


def test_autocast_keeps_dtypes_of_values_and_gradients(off_cpu):
    layer = SparseLinear(48, 32, 0.3)
    x = torch.randn(5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):  # backward inside, as some write it
        y.float().sum().backward()
    assert layer.values.grad.dtype is torch.float32
    weight = layer.to_dense().detach()
    wide = (x.double(), weight.double(), layer.bias.detach().double())
    close(y.detach(), dense_linear(*wide), y.dtype)


def test_cpu_kernels_are_not_used(off_cpu):
    layer = SparseLinear(48, 32, 0.3)
    with ops.use_kernel("sparse"):
        assert layer.kernel(6) == "dense"
        layer(torch.randn(6, 48))


def test_capture_keeps_the_dtype_off_the_cpu():
    from dynsparse.ops.linear import products

    with FakeTensorMode():
        values = torch.empty(4, device="cuda")
        x = torch.empty(2, 3, 5, device="cuda", dtype=torch.bfloat16)
        kept = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capture, "record", lambda *args: kept.extend(args))
            products.record(values, x, x)
    assert [(t.dtype, tuple(t.shape)) for t in kept[1:]] == [(torch.bfloat16, (6, 5))] * 2


@pytest.mark.parametrize("panel", [1 << 30, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("b", [1, 4, 64])
def test_no_host_waits(without_cuda, monkeypatch, panel, dtype, b):
    """Fake tensors raise if a number is read, which would be a host wait."""
    monkeypatch.setattr(dense, "PANEL_BYTES", panel)
    pattern = SparsePattern.random((192, 128), 0.3, block_size=b)
    products = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "aten" and "mm" in func.__name__:
                products.append((func.__name__, args[1].dtype))
            return func(*args, **(kwargs or {}))

    sizes = [len(tensor) for tensor in pattern.index]
    with FakeTensorMode(), Watch():
        index = PatternIndex(*(torch.empty(n, dtype=torch.int32, device="cuda") for n in sizes))
        values = torch.empty(pattern.values_shape, device="cuda")
        p = LayerIndex(index, values)
        assert not p.on_cpu
        x = torch.empty(8, 128, device="cuda", dtype=dtype)
        y = dense.forward(x, values, p, torch.empty(192, device="cuda"))
        dx, dw = dense.backward(y, x, values, p, True, True)
        with pytest.raises(RuntimeError):
            int(index.row_ptr[-1])  # what this test would notice
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, torch.float32)
    assert (y.shape, dx.shape, dw.shape) == ((8, 192), (8, 128), pattern.values_shape)
    assert y.device.type == dx.device.type == dw.device.type == "cuda"
    # The gradient comes from the accumulators, and activations are never widened.
    assert {kind for _, kind in products} == {dtype}
    if dtype is not torch.float32:
        assert products[-1][0] == "mm.dtype"


@pytest.mark.parametrize("autocast", [False, True])
def test_dense_weight_is_kept_for_backward_if_small(off_cpu, monkeypatch, autocast):
    made = []
    expand = dense.expand
    monkeypatch.setattr(dense, "expand", lambda *args: made.append(args) or expand(*args))
    dense_layer, sparse_layer = SparseLinear(32, 48, 0.9), SparseLinear(32, 48, 0.1)

    def times(layer, samples, grad=True):
        x = torch.randn(samples, 32, requires_grad=grad)
        made.clear()
        layer.values.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)
        y.float().sum().backward()
        assert layer.values.grad is not None
        return len(made)

    assert times(sparse_layer, 48) == 1  # the weight is as large as x
    assert times(sparse_layer, 47) == 2
    assert times(sparse_layer, 47, grad=False) == 1  # nobody wants the gradient of x
    # As large as the values, where these are float32 and the weight is not.
    assert times(dense_layer, 2) == (1 if autocast else 2)
    assert times(SparseLinear(32, 48, 1.0), 2) == 2  # the values are the weight


def test_kept_weight_has_the_values_of_forward(off_cpu):
    layer = SparseLinear(32, 48, 0.1)
    x = torch.randn(64, 32, requires_grad=True)
    y = layer(x)
    with torch.no_grad():
        layer.values.add_(1)
    with pytest.raises(RuntimeError, match="have changed between forward and backward"):
        y.sum().backward()


@pytest.mark.parametrize("b", [1, 4, 64])
@pytest.mark.parametrize("lines", [0, 1 << 20])
def test_passes_reuse_data_derived_from_the_index(monkeypatch, b, lines):
    monkeypatch.setattr(dense, "KEPT_LINES", lines)
    pattern = SparsePattern.random((128, 192), 0.3, block_size=b)
    values = torch.randn(pattern.values_shape)
    p = LayerIndex(pattern.index, values)
    p.on_cpu = False
    dense.derive(p)
    before = dict(p._derived)
    assert bool(before) == bool(lines)
    y = dense.forward(torch.randn(5, 192), values, p, None)
    dense.backward(y, torch.randn(5, 192), values, p, True, True)
    assert p._derived == before


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_convolutions_reuse_data_derived_from_the_index(off_cpu, density):
    layer = SparseConv2d(4, 8, 3, density=density)
    p = layer._state.index
    dense.derive(p)
    before = dict(p._derived)
    layer(torch.randn(2, 4, 6, 6, requires_grad=True)).square().sum().backward()
    assert p._derived == before
