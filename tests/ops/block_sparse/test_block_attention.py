"""Block-sparse attention, in kernels and in plain torch, equals masked dense attention."""

from __future__ import annotations

import pytest
import torch
from against_dense import KINDS, patterns, same
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_of import ISAS, needs_kernels, with_library
from torch._subclasses.fake_tensor import FakeTensorMode

from dynsparse import SparsePattern
from dynsparse.ops import block_sparse
from dynsparse.ops.block_sparse import kernels, naive, plain, products
from dynsparse.ops.block_sparse.kernels import Settings

attend = block_sparse.scaled_dot_product_attention
OPERATOR = torch.ops.dynsparse.block_attention.default


def operands(n, heads, queries, keys, features, outputs, dtype=torch.float64, layout="plain"):
    generator = torch.Generator().manual_seed(queries + keys)

    def one(tokens, width):
        if layout == "by token":
            x = torch.randn(n, tokens, heads, width, generator=generator).transpose(1, 2)
        elif layout == "by feature":
            x = torch.randn(n, heads, width, tokens + 1, generator=generator)[..., 1:].mT
        else:
            x = torch.randn(n, heads, tokens, width, generator=generator)
        return x.to(dtype)

    return one(queries, features), one(keys, features), one(keys, outputs)


LAYOUTS = st.sampled_from(["plain", "by token", "by feature"])


@settings(max_examples=50, deadline=None)
@given(
    pattern=patterns(),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
    causal=st.booleans(),
    padded=st.booleans(),
    layout=LAYOUTS,
    dtype=KINDS,
)
def test_equals_masked_dense_attention(pattern, shape, causal, padded, layout, dtype):
    n, heads, features, outputs = shape
    queries, keys = pattern.shape
    given = operands(n, heads, queries, keys, features, outputs, dtype, layout)
    ours = [x.detach().requires_grad_() for x in given]
    oracle = [x.detach().double().requires_grad_() for x in given]
    away = torch.rand(n, keys, generator=torch.Generator().manual_seed(3)) < 0.3
    away = away if padded else None
    found = attend(*ours, pattern, is_causal=causal, key_padding_mask=away)
    wanted = naive.attention(*oracle, pattern, causal, away)
    same(found, wanted, ours, oracle, dtype)


@pytest.mark.parametrize("block", [1, 8, 16, 32, 64])
def test_sizes_that_reach_every_kernel_path(block):
    pattern = SparsePattern.random((256, 128), 0.3, block_size=block)
    given = operands(2, 3, 256, 128, 64, 48, torch.float32)
    ours = [x.requires_grad_() for x in given]
    oracle = [x.detach().double().requires_grad_() for x in given]
    same(attend(*ours, pattern, scale=0.3), naive.attention(*oracle, pattern, scale=0.3), ours,
         oracle, torch.float32)  # fmt: skip


def test_large_scores_and_padding():
    pattern = SparsePattern.full((32, 32), block_size=16)
    q, k, v = operands(1, 1, 32, 32, 8, 8, torch.float32)
    bias = torch.zeros(1, 32)
    bias[:, 20:] = -1e9
    bias[:, :3] = -torch.inf
    found = attend(10 * q, 10 * k, v, pattern, key_padding_mask=bias)
    scores = 100 * q.double() @ k.double().mT * 8**-0.5 + bias.double()
    torch.testing.assert_close(
        found.double(), scores.softmax(-1) @ v.double(), rtol=1e-3, atol=1e-3
    )
    bias[:] = -torch.inf
    assert not attend(q, k, v, pattern, key_padding_mask=bias).any()


def test_nan_is_propagated():
    pattern = SparsePattern([0, 1], [0, 1], shape=(32, 32), block_size=16)
    q, k, v = operands(1, 1, 32, 32, 8, 8, torch.float32)
    k[0, 0, 17, 3] = torch.nan
    found = attend(q, k, v, pattern)
    assert found[0, 0, 16:].isnan().all()
    assert found[0, 0, :16].isfinite().all()


def _seen(pattern, rate, seed, dtype, queries, keys):
    """Return the weights with and without dropout, computed with an identity matrix as values."""
    q, k, _ = operands(2, 2, queries, keys, 8, 8, dtype)
    v = torch.eye(keys, dtype=dtype).expand(2, 2, -1, -1)
    told = (pattern.index.row_ptr, pattern.index.cols, None)
    rest = (pattern.block_size, True, 0.3)
    dropped, _ = OPERATOR(q, k, v, *told, torch.tensor(seed), *rest, rate)
    return dropped, OPERATOR(q, k, v, *told, None, *rest, 0.0)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_rate_and_scale(dtype):
    pattern = SparsePattern.random((128, 128), 0.5, block_size=16)
    dropped, whole = _seen(pattern, 0.25, 5, dtype, 128, 128)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    assert abs(kept.sum() / (whole != 0).sum() - 0.75) < 0.01
    again, _ = _seen(pattern, 0.25, 5, dtype, 128, 128)
    assert torch.equal(again, dropped)
    other, _ = _seen(pattern, 0.25, 6, dtype, 128, 128)
    assert not torch.equal(other, dropped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [4, 16])
def test_gradients_under_dropout(dtype, block):
    pattern = SparsePattern.random((32, 32), 0.6, block_size=block)
    dropped, whole = _seen(pattern, 0.4, 11, dtype, 32, 32)
    kept = torch.where(whole == 0, 0, (dropped != 0).double() / 0.6)
    given = operands(2, 2, 32, 32, 8, 8, dtype)
    ours = [x.requires_grad_() for x in given]
    oracle = [x.detach().double().requires_grad_() for x in given]
    index = pattern.index
    found, _ = OPERATOR(
        *ours, index.row_ptr, index.cols, None, torch.tensor(11), block, True, 0.3, 0.4
    )
    wanted = naive.attention(*oracle, pattern, True, None, kept, 0.3)
    same(found, wanted, ours, oracle, dtype)


@needs_kernels
def test_outputs_are_equal_for_any_number_of_threads():
    pattern = SparsePattern.random((256, 256), 0.3, block_size=16)
    given = operands(1, 1, 256, 256, 32, 32, torch.float32)
    index, s = pattern.index, Settings(16, True, 0.2, 0.1, 9)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out, sums = kernels.forward(*given, index.row_ptr, index.cols, None, s)
        gradients = kernels.backward(
            out, *given, out, sums, index.row_ptr, index.cols, None, s, [True] * 3
        )
        found.append((out, *gradients))
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert torch.equal(other[1], found[0][1])
        torch.testing.assert_close(other[2:], found[0][2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block", [1, 4, 12, 16, 32])
def test_each_instruction_set(isa, block):
    pattern = SparsePattern.random((96, 96), 0.4, block_size=block)
    ours = [x.requires_grad_() for x in operands(2, 2, 96, 96, 20, 20, torch.float32)]
    oracle = [x.detach().double().requires_grad_() for x in ours]
    wanted = naive.attention(*oracle, pattern, True, scale=0.2)

    def compare():
        found = attend(*ours, pattern, is_causal=True, scale=0.2)
        same(found, wanted, ours, oracle, torch.float32)

    with_library(isa, compare)


def test_opcheck():
    pattern = SparsePattern([0, 2, 2], [1, 0, 2], shape=(12, 12), block_size=4)
    index, bias = pattern.index, torch.zeros(2, 12)
    for dtype in (torch.float32, torch.float64):
        given = [x.requires_grad_() for x in operands(2, 1, 12, 12, 5, 3, dtype)]
        told = (*given, index.row_ptr, index.cols, bias.to(dtype), torch.tensor(4), 4, True, 0.5)
        for rate in (0.0, 0.3):
            torch.library.opcheck(OPERATOR, (*told, rate))
        out, sums = OPERATOR(*told, 0.3)
        plain_tensors = [x.detach() for x in (out, *given, out, sums)]
        backward = torch.ops.dynsparse.block_attention_backward.default
        tests = ("test_schema", "test_faketensor")
        rest = (*told[3:], 0.3, [True, False, True])
        torch.library.opcheck(backward, (*plain_tensors, *rest), test_utils=tests)
    small = [x.requires_grad_() for x in operands(1, 1, 12, 12, 2, 2)]
    assert torch.autograd.gradcheck(lambda *x: attend(*x, pattern, is_causal=True), small)


def test_compiled_and_under_autocast():
    pattern = SparsePattern.random((32, 32), 0.5, block_size=16)
    given = [x.requires_grad_() for x in operands(1, 2, 32, 32, 8, 8, torch.float32)]

    def call(*x):
        return attend(*x, pattern, is_causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), call(*given))
    got, wanted = (torch.autograd.grad(f(*given).sum(), given) for f in (compiled, call))
    torch.testing.assert_close(got, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*given).dtype == torch.bfloat16


def test_bad_arguments():
    pattern = SparsePattern.full((8, 8), block_size=4)
    q, k, v = operands(1, 1, 8, 8, 4, 4, torch.float32)
    wrong = [
        (lambda: attend(q[:, :, :4], k, v, pattern), "L = 8"),
        (lambda: attend(q, k[..., :2], v, pattern), "E = 4"),
        (lambda: attend(q, k, v.double(), pattern), "float32"),
        (lambda: attend(q[0], k[0], v[0], pattern), "N, heads"),
        (lambda: attend(q, k, v, pattern, dropout_p=1.0), "dropout_p"),
        (lambda: attend(q, k, v, pattern, scale=torch.inf), "scale"),
        (lambda: attend(q, k, v, pattern, key_padding_mask=torch.zeros(1, 7)), r"\[1, 8\]"),
        (lambda: attend(q, k, v, pattern, key_padding_mask=torch.zeros(1, 8).int()), "bool"),
        (
            lambda: attend(q, k, v, pattern, key_padding_mask=torch.zeros(1, 8).requires_grad_()),
            "detach",
        ),
        (lambda: attend(q[:, :0], k[:, :0], v[:, :0], pattern), "at least one"),
        (lambda: attend(q, k, v, None), "SparsePattern"),
        (lambda: torch.vmap(lambda x: attend(x, k, v, pattern))(q[None]), "torch.func"),
    ]
    for call, words in wrong:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words) as told:
            call()
        assert "\n" not in str(told.value)
    q.requires_grad_()
    (grad,) = torch.autograd.grad(attend(q, k, v, pattern).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("row_ptr", "cols"),
    [([0, 1, 9], [0, 1]), ([0, 3, 2], [0, 1]), ([0, 1, 2], [0, 2]), ([0, 1, 2], [-1, 0]),
     ([0, 2], [0, 1])],
)  # fmt: skip
def test_invalid_index_raises(row_ptr, cols):
    given = operands(1, 1, 8, 8, 4, 4, torch.float32)
    index = (torch.tensor(row_ptr, dtype=torch.int32), torch.tensor(cols, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="row_ptr"):
        OPERATOR(*given, *index, None, None, 4, False, 1.0, 0.0)


def test_memory_is_proportional_to_the_blocks(largest_tensor):
    """Plain torch also creates no tensor of size queries x keys."""
    pattern = SparsePattern([0, 3], [1, 2], shape=(4096, 4096), block_size=16)
    given = [x.requires_grad_() for x in operands(1, 1, 4096, 4096, 4, 4)]
    with largest_tensor:
        index = pattern.index
        s = Settings(16, False, 1.0, 0.0, 0)
        out, sums = plain.forward(*given, index.row_ptr, index.cols, None, s)
        plain.backward(out, *given, out, sums, index.row_ptr, index.cols, None, s, [True] * 3)
    assert largest_tensor.elements <= 4096 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_host_waits(monkeypatch, dtype):
    """Devices compute it in plain torch over the blocks, with sizes known beforehand."""
    # Which adds up in another order on every run.
    monkeypatch.setattr(torch.Tensor, "index_add", None)
    with FakeTensorMode():
        tensors = [
            torch.empty(2, 3, tokens, 8, dtype=dtype, device="meta") for tokens in (64, 96, 96)
        ]
        row_ptr = torch.empty(5, dtype=torch.int32, device="meta")
        cols = torch.empty(7, dtype=torch.int32, device="meta")
        bias = torch.empty(2, 96, dtype=dtype, device="meta")
        options = Settings(16, True, 0.1, 0.0, 7)
        out, sums = plain.forward(*tensors, row_ptr, cols, bias, options)
        assert (out.dtype, out.shape) == (dtype, (2, 3, 64, 8))
        needed = (True, True, True)
        grads = plain.backward(out, *tensors, out, sums, row_ptr, cols, bias, options, needed)
        assert [g.shape for g in grads] == [t.shape for t in tensors]
        with pytest.raises(RuntimeError):
            int(row_ptr[0])  # what this test would notice


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_ordered_sums(dim):
    parts, which = torch.randn(5, 5, 5, 3).double(), torch.tensor([2, 0, 2, 1, 2])
    shape = [*parts.shape]
    shape[dim] = 4
    zeros = torch.zeros(shape).double()
    wanted = zeros.index_add(dim, which, parts)
    assert torch.equal(products.index_add_in_order(zeros, which, dim, parts), wanted)
    assert torch.equal(products.sum_by_index(parts, which, dim, 4), wanted)


def test_index_is_copied_to_a_device_once():
    pattern = SparsePattern.random((64, 96), 0.3, block_size=16)
    meta = torch.device("meta")
    with torch.inference_mode():
        first = pattern._shared_on(meta)
    assert pattern._shared_on(meta) is first
    assert not first.cols.is_inference()
    assert pattern._shared_on(torch.device("cpu")) is pattern.index
