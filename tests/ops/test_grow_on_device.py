"""Growth and selection with known sizes: results checked on the CPU, waits on fake tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dynsparse import SparsePattern
from dynsparse.ops.grow import on_device, random_outside, select, topk_outside
from dynsparse.ops.grow.naive import topk_outside_naive
from dynsparse.ops.grow.selection import select_on_device
from dynsparse.ops.grow.topk import topk_of_layers

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3.0, 1e-40, torch.inf, -torch.inf])),
    st.sampled_from([*FLOATS, torch.int64]),
    st.booleans(),
    st.data(),
)
def test_selection(scores, dtype, largest, data):
    given_scores = torch.tensor(scores, dtype=torch.float64)
    if dtype is torch.int64:
        given_scores = given_scores.clamp(-9, 9)
    scores = given_scores.to(dtype)
    k = data.draw(st.integers(0, len(scores)))
    wanted = select(scores.double(), k, largest=largest)
    assert torch.equal(select_on_device(scores, k, largest), wanted)
    both = select_on_device(torch.stack([scores, scores.flip(0)]), k, largest)
    assert torch.equal(both[0], wanted)
    assert torch.equal(both[1], select_on_device(scores.flip(0), k, largest))


def test_random_numbers_in_float64_and_float32():
    pattern = SparsePattern.random((96, 160), 0.2, block_size=4)
    for dtype in (torch.float64, torch.float32):
        x, dy = torch.randn(30, 160, dtype=dtype), torch.randn(30, 96, dtype=dtype)
        for pooling in ("sum", "avg", "max"):
            wanted, _ = topk_outside_naive([(x, dy)], pattern, 50, pooling=pooling)
            flat, _ = on_device.topk_on_device([[(x, dy)]], [pattern], 50, pooling, dtype)
            assert torch.equal(flat[0], wanted.sort().values)


@pytest.mark.parametrize("panel_bytes", [4 * 24 * 3, 1 << 20])
def test_layers_are_ranked_together(monkeypatch, panel_bytes):
    """Layers of three sizes, of float32 and float64, with one or two pairs."""
    monkeypatch.setattr(on_device, "PANEL_BYTES", panel_bytes)
    layers = []
    for i in range(8):
        dtype = torch.float64 if i == 5 else torch.float32
        shape = (48, 64) if i % 3 else (64, 48)
        pattern = SparsePattern.random(shape, 0.3, block_size=4)
        pairs = [
            (torch.randn(7, shape[1]).to(dtype), torch.randn(7, shape[0]).to(dtype))
            for _ in range(1 + i % 2)
        ]
        layers.append((pairs, pattern, 0 if i == 7 else 9, dtype))
    found = topk_of_layers(*zip(*layers, strict=True), "avg")
    for (pairs, pattern, k, dtype), best in zip(layers, found, strict=True):
        flat, scores = topk_outside_naive(pairs, pattern, k, pooling="avg")
        order = flat.sort().indices
        assert torch.equal(best.flat, flat[order])
        torch.testing.assert_close(best.scores, scores[order].to(dtype))


@given(st.integers(0, 40), st.integers(0, 99))
def test_random_positions_equal_the_cpu(k, seed):
    pattern = SparsePattern.random((10, 12), 0.4)
    there = SparsePattern._from_device(pattern.flat, pattern)
    wanted, got = (
        random_outside(p, k, generator=torch.Generator().manual_seed(seed))
        for p in (pattern, there)
    )
    assert torch.equal(wanted, got)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("panel_bytes", [1 << 10, 16 << 20])
def test_no_host_waits(monkeypatch, dtype, b, panel_bytes):
    monkeypatch.setattr(on_device, "PANEL_BYTES", panel_bytes)
    like = SparsePattern.random((64, 128), 0.1, block_size=b)
    with FakeTensorMode():
        held = torch.empty(like.nnz, dtype=torch.int64, device="cuda")
        pattern = SparsePattern._from_device(held, like)
        x = torch.empty(8, 128, device="cuda", dtype=dtype)
        dy = torch.empty(8, 64, device="cuda", dtype=dtype)
        found = topk_outside([(x, dy), (x, dy)], pattern, 20)
        assert found.flat.device == found.scores.device == held.device
        assert found.flat.shape == (20,)
        drop = select(torch.empty(like.nnz, device="cuda", dtype=dtype), 20, largest=False)
        assert drop.device == held.device
        with pytest.raises(ValueError, match="one device"):
            topk_outside([(x, torch.empty(8, 64))], pattern, 20)


def test_no_dense_gradient_is_allocated(monkeypatch, largest_tensor):
    """Only a panel, its keys and tensors proportional to the pattern are allocated."""
    monkeypatch.setattr(on_device, "PANEL_BYTES", 4 * 256 * 8)
    like = SparsePattern.random((512, 256), 0.01)
    x, dy = torch.randn(3, 256), torch.randn(3, 512)
    with largest_tensor:
        on_device.topk_on_device([[(x, dy)]], [like], 300, "sum", torch.float32)
    assert largest_tensor.elements <= 8 * 256 + 300 + like.nnz
