"""The custom operator in torch; its kernels have separate tests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from product_checks import shuffle_slots
from torch.nn.functional import linear as dense_linear

from dynsparse import SparsePattern, ops
from dynsparse.nn import SparseLinear
from dynsparse.ops import capture
from dynsparse.ops.linear import linear, naive

BLOCKS = [1, 3, 4, 8, 16, 32, 64, 128]


def make(block_size, grid=(4, 5), density=0.4, dtype=torch.float64, batch=(6,)):
    pattern = SparsePattern.random(
        (grid[0] * block_size, grid[1] * block_size), density, block_size=block_size
    )
    x = torch.randn(*batch, pattern.shape[1], dtype=dtype, requires_grad=True)
    values = torch.randn(pattern.values_shape, dtype=dtype, requires_grad=True)
    bias = torch.randn(pattern.shape[0], dtype=dtype, requires_grad=True)
    return pattern, x, values, bias


@given(
    st.sampled_from([1, 2, 4, 5]),
    st.integers(1, 6),
    st.integers(1, 6),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_naive_passes_equal_dense_float64(b, height, width, density, batch):
    pattern, x, values, bias = make(b, (height, width), density, batch=(batch,))
    if batch % 2:
        pattern = shuffle_slots(pattern, torch.default_generator)
    dense = pattern.to_dense(values)
    y = naive.forward(x, values, pattern.index, bias)
    torch.testing.assert_close(y, dense_linear(x, dense, bias))
    dy = torch.randn_like(y)
    torch.testing.assert_close(naive.grad_input(dy, values, pattern.index), dy @ dense)
    torch.testing.assert_close(
        naive.grad_weight(dy, x, values, pattern.index), pattern.values_of(dy.t() @ x)
    )


def test_naive_passes_in_chunks(monkeypatch):
    monkeypatch.setattr(naive, "_CHUNK_ELEMENTS", 7)
    test_naive_passes_equal_dense_float64.hypothesis.inner_test(2, 4, 3, 0.5, 5)


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lead", [(), (7,), (2, 0, 3), (2, 3, 5)])
def test_forward_and_backward_equal_dense(block_size, dtype, lead):
    pattern, x, values, bias = make(block_size, dtype=dtype, batch=lead)
    y = linear(x, values, pattern, bias)
    assert (y.dtype, y.shape) == (dtype, (*lead, pattern.shape[0]))
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, values, bias), dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, values, bias)]
    reference = dense_linear(leaves[0], pattern.to_dense(leaves[1]), leaves[2])
    expected = torch.autograd.grad(reference, leaves, dy.double())
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 2e-2)
    for a, e in zip((y, *got), (reference, *expected), strict=True):
        scale = max(1.0, float(e.detach().abs().max())) if e.numel() else 1.0
        torch.testing.assert_close(a.double(), e, rtol=0, atol=tolerance * scale)
    for tensor, grad in zip((x, values, bias), got, strict=True):
        assert tensor.dtype == grad.dtype
        assert tensor.shape == grad.shape


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block_size", [1, 4])
def test_gradcheck_and_opcheck(block_size):
    pattern, x, values, bias = make(block_size, (2, 3), batch=(2, 2))

    def call(x, values, bias):
        return linear(x, values, pattern, bias)

    assert torch.autograd.gradcheck(call, (x, values, bias))
    operator = torch.ops.dynsparse.linear.default
    torch.library.opcheck(operator, (x, values, *pattern.index, bias))
    torch.library.opcheck(operator, (x, values, *pattern.index, None))
    backward = torch.ops.dynsparse.linear_backward.default
    y = torch.randn(2, 2, pattern.shape[0], dtype=torch.float64)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for x_or_none in (x.detach(), None):
        torch.library.opcheck(
            backward, (y, x_or_none, values.detach(), *pattern.index, True), test_utils=tests
        )


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_requires_grad_on_any_subset(needs):
    pattern, *leaves = make(1)
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(bool(need))
    y = linear(leaves[0], leaves[1], pattern, leaves[2])
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
    for leaf, need in zip(leaves, needs, strict=True):
        assert (leaf.grad is not None) == bool(need)


def test_frozen_weight_saves_no_input():
    pattern, x, values, _ = make(1)
    y = linear(x, values.detach(), pattern)
    assert y.grad_fn.saved_tensors[0] is None


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "strided"])
def test_strided_inputs_and_gradients(layout):
    pattern, _, values, bias = make(1, (24, 40), dtype=torch.float32)

    def strided(features):
        return {
            "transposed": lambda: torch.randn(features, 9).t(),
            "sliced": lambda: torch.randn(9, features + 5)[:, 3 : 3 + features],
            "expanded": lambda: torch.randn(1, features).expand(9, features),
            "strided": lambda: torch.randn(18, 2 * features)[::2, ::2],
        }[layout]()

    x, dy = strided(40).requires_grad_(), strided(24)
    y = linear(x, values, pattern, bias)
    dense = pattern.to_dense(values)
    torch.testing.assert_close(y, dense_linear(x, dense, bias))
    dx, dw = torch.autograd.grad(y, (x, values), dy)
    torch.testing.assert_close(dx, dy @ dense)
    torch.testing.assert_close(dw, pattern.values_of(dy.t() @ x))


@pytest.mark.parametrize("kind", ["sparse", "small", "dense"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_strided_values_and_biases(kind, block_size):
    pattern, x, values, bias = make(block_size, (6, 10), dtype=torch.float32)
    apart = values.detach().repeat_interleave(2, dim=-1)[..., ::2].requires_grad_()
    wide = torch.ones(1).expand(len(bias)).requires_grad_()
    assert not apart.is_contiguous()
    assert not wide.is_contiguous()
    layer = SparseLinear(*reversed(pattern.shape), pattern=pattern)
    layer.values.data, layer.bias.data = apart.detach(), wide.detach()
    dy = torch.randn(6, pattern.shape[0])
    dense = dense_linear(x, pattern.to_dense(values), torch.ones_like(bias))
    expected = torch.autograd.grad(dense, (x, values), dy)
    with ops.use_kernel(kind):
        for y, given in ((linear(x, apart, pattern, wide), apart), (layer(x), layer.values)):
            torch.testing.assert_close(y, dense)
            torch.testing.assert_close(torch.autograd.grad(y, (x, given), dy), expected)


def test_single_passes():
    pattern, x, values, _ = make(2)
    dy = torch.randn(6, pattern.shape[0], dtype=torch.float64)
    dense = pattern.to_dense(values)
    torch.testing.assert_close(ops.grad_input(dy, values, pattern), dy @ dense)
    torch.testing.assert_close(
        ops.grad_weight(dy, x, values, pattern), pattern.values_of(dy.t() @ x)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_activations_only(dtype):
    pattern, x, values, bias = make(1, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        y = linear(x, values, pattern, bias)
        y.float().sum().backward()
    assert y.dtype == dtype
    assert (x.grad.dtype, values.grad.dtype, bias.grad.dtype) == (torch.float32,) * 3
    expected = dense_linear(x.to(dtype).float(), pattern.to_dense(values), bias)
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)


def test_capture_keeps_every_backward_pass():
    pattern, x, values, _ = make(1)
    held = capture.start(pattern.row_ptr, values)
    for scale in (1.0, 2.0):
        (linear(x, values, pattern) * scale).sum().backward()
    assert len(held) == 2
    assert [dy[0, 0].item() for _, dy in held] == [1, 2]
    assert all(torch.equal(kept, x) for kept, _ in held)


@pytest.mark.parametrize("watched", [False, True])
def test_pairs_without_gradient_are_freed(watched):
    pattern, x, values, _ = make(1, dtype=torch.float32)
    held = capture.start(pattern.row_ptr, values)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=watched):
            y = linear(x, values, pattern)
            (y + linear(2 * x, values, pattern)).float().sum().backward()

    for gone in (lambda: setattr(values, "grad", None), lambda: values.grad.zero_()):
        for _ in range(10):
            run()
            run()
            assert len(held) >= 4
            gone()
        assert len(held) <= 8
    held = capture.start(pattern.row_ptr, values)
    for _ in range(5):
        torch.autograd.grad(linear(x, values, pattern).sum(), values)
    assert len(held) == 1


def test_zero_gradient_keeps_its_pairs():
    pattern, x, values, _ = make(1)
    held = capture.start(pattern.row_ptr, values)
    for scale in (1.0, 0.0, 0.0, 1.0):
        (linear(x, values, pattern) * 0 * scale).sum().backward()
    assert len(held) == 4


def test_capture_ends_with_its_list():
    pattern, x, values, _ = make(1)
    held = capture.start(pattern.row_ptr, values)
    linear(x, values, pattern).sum().backward()
    again = capture.start(pattern.row_ptr, values)
    assert (len(held), len(again)) == (1, 0)
    linear(x, values, pattern).sum().backward()
    assert (len(held), len(again)) == (1, 1)
    del again  # nobody waits for it any more
    assert not capture.is_open(pattern.row_ptr)
    linear(x, values, pattern).sum().backward()
    capture.start(pattern.row_ptr, torch.empty(0))
    assert not capture.is_open(pattern.row_ptr)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, v: (x[:, 1:], v), "x must end in 20 features.*19"),
        (lambda x, v: (x[0, 0], v), "x must end in 20 features"),
        (lambda x, v: (x.long(), v), "must be floating point"),
        (
            lambda x, v: (x.float(), v),
            "x is torch.float32 but the layer's values are torch.float64",
        ),
        (lambda x, v: (x, v.bfloat16()), "values are torch.bfloat16"),
    ],
)
def test_wrong_tensors(change, message):
    pattern, x, values, _ = make(4)
    with pytest.raises(RuntimeError, match=message):
        linear(*change(x.detach(), values.detach()), pattern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_too_short_operands_raise(dtype):
    pattern, x, values, bias = (
        t.detach() if isinstance(t, torch.Tensor) else t for t in make(1, (8, 9), dtype=dtype)
    )
    index = pattern.index
    wide = index._replace(cols=index.cols.long())
    dy = torch.randn(6, 8, dtype=dtype)
    calls = {
        f"values hold 5 blocks but the pattern has {pattern.nnz}": lambda: linear(
            x, values[:5], pattern
        ),
        r"values must be \[nnz\] or": lambda: linear(x, values[:, None], pattern),
        r"bias must be \[8\]": lambda: linear(x, values, pattern, bias[:3]),
        "differ in length": lambda: linear(x, values, index._replace(csc_rows=index.cols[:2])),
        "must be int32 on cpu": lambda: linear(x, values, wide),
        "dy must end in 8 features": lambda: ops.grad_input(dy[:, :7], values, pattern),
        "values hold 4": lambda: ops.grad_input(dy, values[:4], pattern),
        "x must end in 9 features": lambda: ops.grad_weight(dy, x[:, :4], values, pattern),
        "agree in all but the features": lambda: ops.grad_weight(dy[:3], x, values, pattern),
    }
    for message, call in calls.items():
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.parametrize("slots", [(0, 0, 1, 2), (0, 1, 2, 4), (-1, 0, 1, 2)])
def test_invalid_slots_raise(slots):
    pattern = SparsePattern([0, 0, 1, 2], [0, 2, 1, 2], shape=(3, 3))
    index = pattern.index._replace(slots=torch.tensor(slots, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="slots must"):
        linear(torch.ones(2, 3), torch.ones(4), index)


@pytest.mark.parametrize("grad", [False, True])
def test_dispatch_modes_see_the_operator(grad):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    pattern, x, values, bias = make(1)
    with torch.set_grad_enabled(grad), Seen() as seen:
        watched = torch.ops.dynsparse.linear(x, values, *pattern.index, bias)
    assert "dynsparse::linear" in seen.names
    assert torch.equal(watched, linear(x, values, pattern, bias))


@pytest.mark.parametrize("place", [0, 1])
def test_tensor_subclasses_see_the_operator_without_grad(place):
    class Watching(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(func.name())
            plain = [a.plain if isinstance(a, cls) else a for a in args]
            return func(*plain, **(kwargs or {}))

    seen: list[str] = []
    pattern, *operands, bias = make(1)
    with torch.no_grad():
        expected = torch.ops.dynsparse.linear(*operands, *pattern.index, bias)
        plain = operands[place].detach()
        operands[place] = torch.Tensor._make_wrapper_subclass(
            Watching, plain.shape, dtype=plain.dtype
        )
        operands[place].plain = plain
        y = torch.ops.dynsparse.linear(*operands, *pattern.index, bias)
    assert seen == ["dynsparse::linear"]
    assert torch.equal(y, expected)


def test_meta_tensors():
    pattern, x, values, bias = make(4, dtype=torch.float32, batch=(2, 3))
    index = [tensor.to("meta") for tensor in pattern.index]
    y = torch.ops.dynsparse.linear(
        x.detach().to("meta"), values.detach().to("meta"), *index, bias.detach().to("meta")
    )
    assert y.shape == (2, 3, pattern.shape[0])


@pytest.mark.parametrize("watched", [False, True])
def test_split_backward_captures_one_pair(watched):
    """As in zero-bubble pipelines: first grad_input, later grad_weight."""
    pattern, x, values, _ = make(1, dtype=torch.float32)
    held = capture.start(pattern.row_ptr, values)
    with torch.autocast("cpu", torch.bfloat16, enabled=watched):
        y = linear(x * 1, values, pattern).float()
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, (x, values), dy, retain_graph=True)
    assert len(held) == 1
    held.clear()
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    assert len(held) == 0
    (dw,) = torch.autograd.grad(y, values, dy)
    assert len(held) == 1
    assert torch.equal(dx, expected[0])
    assert torch.equal(dw, expected[1])


def test_layers_sharing_a_pattern_capture_separately():
    pattern, x, _, _ = make(1, dtype=torch.float32)
    layers = [SparseLinear(*reversed(pattern.shape), pattern=pattern) for _ in range(2)]
    held = [capture.start(layer.index.row_ptr, layer.values) for layer in layers]
    layers[1](x).sum().backward()
    assert [len(pairs) for pairs in held] == [0, 1]
    parameters = dict(layers[0].named_parameters())
    torch.func.functional_call(layers[0], parameters, x).sum().backward()
    assert [len(pairs) for pairs in held] == [1, 1]
