"""SparseConv2d and SparseConv1d equal nn.Conv2d and nn.Conv1d with the same weights."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dynsparse as ds
from dynsparse._core import native
from dynsparse.nn import SparseConv1d, SparseConv2d, fuse_conv_bn_eval
from dynsparse.ops.conv import naive
from dynsparse.ops.conv.geometry import to_matrix, to_weight


def twin(layer):
    """Make the dense layer with the same options and weights."""
    dense = layer.dense_class(
        layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding,
        layer.dilation, layer.groups, layer.bias is not None, layer.padding_mode,
        dtype=layer.values.dtype,
    )  # fmt: skip
    with torch.no_grad():
        dense.weight.copy_(layer.to_dense())
        if layer.bias is not None:
            dense.bias.copy_(layer.bias)
    return dense


def check(layer, x, tolerance):
    """Compare forward and all gradients with those of the dense layer in float64."""
    dense = twin(layer).double()
    x64 = x.detach().double().requires_grad_()
    x = x.detach().requires_grad_()
    y, expected = layer(x), dense(x64)
    assert y.shape == expected.shape
    scale = max(1.0, float(expected.detach().abs().max()))
    assert float((y - expected).abs().max().detach()) <= tolerance * scale
    dy = torch.randn(y.shape, dtype=torch.float64)
    y.backward(dy.to(y.dtype))
    expected.backward(dy)
    got = [x.grad, layer.pattern.to_dense(layer.values.grad)]
    mask = layer.pattern.to_mask()
    wanted = [x64.grad, to_matrix(dense.weight.grad) * mask]
    if layer.bias is not None:
        got.append(layer.bias.grad)
        wanted.append(dense.bias.grad)
    for mine, theirs in zip(got, wanted, strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        assert float((mine - theirs).abs().max()) <= tolerance * scale


@st.composite
def layers(draw, dtype=torch.float64, dimensions=(1, 2)):
    """Draw a layer and the shape of its input."""
    d = draw(st.sampled_from(dimensions))
    block = draw(st.sampled_from([1, 1, 2, 4]))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    into, out = (groups * block * draw(st.integers(1, 3)) for _ in range(2))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(d))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(d))
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.sampled_from(["same", "valid", "sizes", "sizes"]))
    stride = tuple(1 if padding == "same" else draw(st.integers(1, 3)) for _ in range(d))
    if padding == "sizes":
        padding = tuple(draw(st.integers(0, 3)) for _ in range(d))
    reach = [(k - 1) * s + 1 for k, s in zip(kernel, dilation, strict=True)]
    size = tuple(draw(st.integers(max(4, r), r + 6)) for r in reach)
    kind = SparseConv1d if d == 1 else SparseConv2d
    layer = kind(
        into, out, kernel, stride, padding, dilation, groups, draw(st.booleans()), mode,
        density=draw(st.sampled_from([0.05, 0.3, 1.0])), block_size=block, dtype=dtype,
    )  # fmt: skip
    batch = draw(st.sampled_from([(), (1,), (2,), (3,)]))
    x = torch.randn(*batch, into, *size, dtype=dtype)
    if batch and d == 2 and draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    return layer, x


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@given(layers())
def test_equals_dense_in_float64(case):
    check(*case, 1e-10)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@given(layers(torch.float32))
def test_float32_is_close_to_dense_float64(case):
    check(*case, 2e-5)


@st.composite
def kernel_cases(draw):
    """Draw a case for the kernels: batches that do and do not fill streams or split images."""
    block = draw(st.sampled_from([1, 1, 2, 3, 4, 16]))
    groups = draw(st.sampled_from([1, 1, 2]))
    into, out = (groups * block * draw(st.integers(1, 2)) for _ in range(2))
    kernel, stride, dilation, padding, size = (
        tuple(draw(st.integers(low, high)) for _ in range(2))
        for low, high in ((1, 3), (1, 3), (1, 2), (0, 3), (0, 9))
    )
    size = tuple(n + (k - 1) * d + 1 for n, k, d in zip(size, kernel, dilation, strict=True))
    layer = SparseConv2d(
        into, out, kernel, stride, padding, dilation, groups, draw(st.booleans()),
        density=draw(st.sampled_from([0.05, 0.3])), block_size=block,
    )  # fmt: skip
    x = torch.randn(draw(st.sampled_from([1, 2, 5, 16, 19, 33])), into, *size)
    way = draw(st.sampled_from(["planes", "channels last", "turned"]))
    if way == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    return layer, x, way == "turned"


@pytest.mark.skipif(native.load() is None, reason="needs the compiled kernels")
@given(kernel_cases(), st.sampled_from([1, 2, 3]))
def test_kernels_equal_the_sum_over_nonzeros(case, threads):
    layer, x, turned = case
    g, index, values = layer.geometry, layer.index, layer.values.detach()
    dy = torch.randn(len(x), layer.out_channels, *g.output_size(*x.shape[2:]))
    y64 = naive.forward(x.double(), values.double(), index, None, g)
    bias = None if layer.bias is None else layer.bias.detach()
    y64 = y64 if bias is None else y64 + bias.double()[:, None, None]
    dx64 = naive.grad_input(dy.double(), values.double(), index, x.shape[2:], g)
    dw64 = naive.grad_weight(dy.double(), x.double(), values.double(), index, g)
    if turned:  # strides that nobody expects
        x, dy = (t.transpose(1, 3).contiguous().transpose(1, 3).flip(0).flip(0) for t in (x, dy))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ds.ops.use_kernel("sparse"):
            assert layer.kernel(len(x), x.shape[2:]) == "sparse"
            y = ds.ops.conv.conv(x, values, index, g, bias)
            dx = ds.ops.conv.grad_input(dy, values, index, g, x.shape[2:])
            dw = ds.ops.conv.grad_weight(dy, x, values, index, g)
            both = torch.ops.dynsparse.conv_backward(
                dy, x, values, *index, g.to_list(), x.shape[2:], True
            )
    finally:
        torch.set_num_threads(before)
    for mine, exact in ((y, y64), (dx, dx64), (dw, dw64), (both[0], dx64), (both[1], dw64)):
        scale = max(1.0, float(exact.abs().max()))
        assert float((mine - exact).abs().max()) <= 2e-5 * scale


def test_matrix_layout_by_hand():
    weight = torch.arange(2.0 * 3 * 1 * 2).view(2, 3, 1, 2)  # [out, in, kh, kw]
    matrix = torch.tensor([[0.0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]])  # taps outside
    assert torch.equal(to_matrix(weight), matrix)
    assert torch.equal(to_weight(matrix, (1, 2)), weight)
    pattern = ds.SparsePattern([1], [4], shape=(2, 6))
    layer = SparseConv2d(3, 2, (1, 2), bias=False, pattern=pattern)
    assert layer.to_dense().nonzero().tolist() == [[1, 1, 0, 1]]


def test_block_covers_channels_of_one_tap():
    pattern = ds.SparsePattern([0], [3], shape=(4, 2 * 4), block_size=2)
    layer = SparseConv1d(4, 4, 2, pattern=pattern)
    assert layer.to_dense().nonzero().tolist() == [[o, i, 1] for o in (0, 1) for i in (2, 3)]


@pytest.mark.parametrize("make", [nn.Conv2d, nn.Conv1d])
def test_from_dense_keeps_the_largest_weights(make):
    dense = make(6, 4, 3, 2, 1, groups=2).requires_grad_(False)
    kind = SparseConv2d if make is nn.Conv2d else SparseConv1d
    layer = kind.from_dense(dense, 0.25)
    kept = layer.to_dense() != 0
    assert int(kept.sum()) == round(0.25 * dense.weight.numel())
    assert torch.equal(layer.to_dense()[kept], dense.weight[kept])
    assert float(dense.weight[kept].abs().min()) >= float(dense.weight[~kept].abs().max())
    assert torch.equal(layer.bias, dense.bias)
    assert layer.bias is not dense.bias


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_output_keeps_the_memory_format(layout):
    layer = SparseConv2d(4, 8, 3, padding=1)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=layout).requires_grad_()
    y = layer(x)
    assert y.is_contiguous(memory_format=layout)
    y.square().sum().backward()
    assert x.grad.is_contiguous(memory_format=layout)


def test_second_derivatives():
    g = torch.Generator().manual_seed(0)
    layer = SparseConv2d(2, 4, (2, 3), (1, 2), 1, groups=2, density=0.5, generator=g).double()
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    index = layer.index

    def function(x, values, bias):
        return ds.ops.conv.conv(x, values, index, layer.geometry, bias)

    inputs = (x, layer.values, layer.bias)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.slow
def test_opcheck():
    layer = SparseConv2d(4, 4, 3, 2, 1, density=0.3)
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    numbers = layer.geometry.to_list()
    arguments = (x, layer.values, *layer.index, layer.bias, numbers)
    torch.library.opcheck(torch.ops.dynsparse.conv, arguments)
    dy = layer(x).detach().requires_grad_()
    rest = (layer.values, *layer.index, numbers, [6, 6], True)
    torch.library.opcheck(torch.ops.dynsparse.conv_backward, (dy, x, *rest))


@pytest.mark.slow
def test_compiled():
    model = nn.Sequential(SparseConv2d(3, 8, 3, padding=1), nn.ReLU(), SparseConv2d(8, 4, 3, 2))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 8, 8)
    for net, run in ((model, model), (other, compiled)):
        run(x).square().sum().backward()
        assert net[0].values.grad is not None
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_activations_with_float32_values(dtype):
    layer = SparseConv2d(4, 8, 3, padding=1)
    x = torch.randn(2, 4, 6, 6).to(dtype).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), layer(x.float()), rtol=1e-2, atol=1e-2)
    y.sum().backward()
    assert (x.grad.dtype, layer.values.grad.dtype) == (dtype, torch.float32)


def test_autocast():
    layer = SparseConv2d(4, 8, 3, padding=1)
    x = torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.values.grad.dtype == torch.float32


def test_dense_weight():
    layer = SparseConv2d(4, 8, (1, 3))
    assert (layer.weight.shape, layer.weight.dtype) == ((8, 4, 1, 3), torch.float32)
    with pytest.warns(UserWarning, match="uses the dense weight"):
        assert torch.equal(layer.weight + 0, layer.to_dense())


def test_folded_batch_norm_keeps_outputs():
    for kind, norm, size in ((SparseConv2d, nn.BatchNorm2d, (6, 5)),
                             (SparseConv1d, nn.BatchNorm1d, (7,))):  # fmt: skip
        for b, bias, affine in itertools.product([1, 2], [True, False], [True, False]):
            conv = kind(4, 6, 3, density=0.4, block_size=b, bias=bias).double()
            bn = norm(6, affine=affine).double()
            x = torch.randn(5, 4, *size).double()
            bn(conv(x))
            if affine:
                nn.init.normal_(bn.weight)
                nn.init.normal_(bn.bias)
            conv.eval(), bn.eval()
            before = conv.to_dense()
            fused = fuse_conv_bn_eval(conv, bn)
            torch.testing.assert_close(fused(x), bn(conv(x)), rtol=1e-10, atol=1e-10)
            assert fused.pattern == conv.pattern
            assert torch.equal(conv.to_dense(), before)


def test_unsupported_folding_raises():
    conv = SparseConv2d(4, 6, 3)
    with pytest.raises(ValueError, match=r"call eval\(\)"):
        fuse_conv_bn_eval(conv, nn.BatchNorm2d(6))
    conv.eval()
    for bn, line in (
        (nn.BatchNorm2d(5), "must have 6 channels, got 5"),
        (nn.BatchNorm1d(6), "does not fit"),
        (nn.BatchNorm2d(6, track_running_stats=False), "no running statistics"),
    ):
        with pytest.raises(ValueError, match=line):
            fuse_conv_bn_eval(conv, bn.eval())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"groups": 3}, "groups must divide the channels, got 3 for 4 and 6 channels"),
        ({"kernel_size": (3, 3, 3)}, r"kernel_size must be an integer or 2 of them"),
        ({"kernel_size": 0}, "kernel_size must be an integer of at least 1"),
        ({"padding": "full"}, "padding must be a size, 'same' or 'valid', got 'full'"),
        ({"padding": "same", "stride": 2}, "padding 'same' is for a stride of 1"),
        ({"padding": -1}, "padding must be an integer of at least 0"),
        ({"padding_mode": "mirror"}, "padding_mode must be one of zeros, reflect"),
        ({"block_size": 4}, "block size 4 must divide the channels of a group, got 4 in and 6 out"),
        ({"pattern": ds.SparsePattern([0], [0], shape=(6, 4))}, r"shape \(6, 36\)"),
        ({"density": 0.0}, "density must"),
    ],
)
def test_wrong_options_raise(arguments, line):
    with pytest.raises(ValueError, match=line):
        SparseConv2d(**({"in_channels": 4, "out_channels": 6, "kernel_size": 3} | arguments))


def test_wrong_inputs_raise():
    layer = SparseConv2d(4, 6, 3)
    for x, line in (
        (torch.randn(4, 6), "with or without the batch"),
        (torch.randn(2, 3, 6, 6), r"x must be \[batch, 4, height, width\]"),
        (torch.randn(2, 4, 2, 6), "padded input is 2 x 6, smaller than the kernel"),
        (torch.randn(2, 4, 6, 6).double(), "x is torch.float64 but the layer's values are"),
        (torch.ones(2, 4, 6, 6).int(), "x must be floating point"),
    ):
        with pytest.raises(RuntimeError, match=line):
            layer(x)


def test_repr_lists_options():
    layer = SparseConv2d(4, 8, 3, 2, 1, 2, 2, False, "circular", density=0.25, block_size=2)
    assert repr(layer) == (
        "SparseConv2d(4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(2, 2), "
        "groups=2, padding_mode=circular, density=0.25, nnz=9, block_size=2, bias=False)"
    )


def test_kernel_names():
    layer = SparseConv2d(4, 8, 3).double()
    assert layer.kernel(2, 8) == layer.kernel(2, (8, 8), backward=True) == "dense"
    if native.load() is not None:
        assert layer.float().kernel(32, 8) == "sparse"
    with pytest.raises(ValueError, match="size must be the size of the input"):
        layer.kernel(2)


def test_depthwise_convolutions_are_excluded_by_default():
    def model():
        return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv1d(8, 4, 1))

    m = ds.sparsify(model(), 0.5, allocation="uniform", verbose=False)
    assert [type(layer) for layer in m] == [SparseConv2d, nn.Conv2d, SparseConv1d]
    line = "'1' stays dense: it is a depthwise convolution, whose outputs see one channel each"
    assert line in ds.nn.describe(m).splitlines()
    assert isinstance(ds.sparsify(model(), 0.5, include="1", verbose=False)[1], SparseConv2d)
    ds.densify(m)
    assert [type(layer) for layer in m] == [nn.Conv2d, nn.Conv2d, nn.Conv1d]


def test_flop_counter():
    layer = SparseConv2d(4, 8, 3, padding=1, density=0.25)
    x = torch.randn(2, 4, 6, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 6 * 5) * layer.pattern.nnz


def test_kernel_for_small_batches():
    if native.load() is None:
        pytest.skip("needs the compiled kernels")
    line = ds.nn.SparseConv1d(256, 256, 3, padding=1, density=0.1)
    assert line.kernel(1, 512) == line.kernel(1, 512, backward=True) == "dense"
    assert line.kernel(64, 512) == line.kernel(64, 512, backward=True) == "sparse"
    # Strips of an image fill the vectors of the kernels.
    image = SparseConv2d(64, 64, 3, padding=1, density=0.1)
    assert image.kernel(1, 56) == image.kernel(1, 56, backward=True) == "sparse"
    full = SparseConv2d(64, 64, 3, padding=1, density=1.0)
    assert full.kernel(32, 56) == full.kernel(32, 56, backward=True) == "dense"
