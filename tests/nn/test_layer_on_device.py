"""Layers off the CPU keep their memory in place when the pattern changes."""

import copy

import pytest
import torch
from device_patterns import rewire
from torch.nn.functional import linear as dense_linear

from dynsparse import SparsePattern, ops
from dynsparse.nn import SparseLinear, SparseMultiheadAttention, attention, follow_patterns
from dynsparse.ops.linear import LayerIndex, autograd, products
from dynsparse.ops.linear.cuda import blocks, configurations

pytestmark = pytest.mark.usefixtures("off_cpu")


def computes(layer):
    x = torch.randn(5, layer.in_features)
    weight, bias = layer.to_dense().detach().requires_grad_(), layer.bias.detach()
    layer.values.grad = None
    y, reference = layer(x), dense_linear(x, weight, bias)
    torch.testing.assert_close(y, reference)
    dy = torch.randn_like(y)
    y.backward(dy)
    reference.backward(dy)
    torch.testing.assert_close(layer.values.grad, layer.pattern.values_of(weight.grad))


def addresses(layer):
    lines = [tensor for tensor, _ in layer._state.index._derived.values()]
    tensors = [layer.values, layer._state.memory, *layer.index, *lines]
    return [tensor.data_ptr() for tensor in tensors if tensor.numel()]


def another(layer):
    return SparsePattern.random(
        layer.pattern.shape, nnz=layer.pattern.nnz, block_size=layer.block_size
    )


def rewiring_on_device(layer, k=5):
    """Make a rewiring on the device."""
    pattern = layer.pattern
    free = [i for i in range(pattern.total) if i not in set(pattern.flat.tolist())]
    return rewire(pattern, torch.arange(k), torch.tensor(free[1 : 1 + k]), row_major=True)


@pytest.fixture(params=[1, 4])
def layer(request):
    made = SparseLinear(48, 32, 0.3, request.param)
    computes(made)
    return made


def test_update_keeps_memory(layer):
    before, parameter, state = addresses(layer), layer.values, layer._state
    for _ in range(3):
        rewiring = rewiring_on_device(layer)
        wanted = rewiring.apply(layer.values.detach(), 2.0)
        layer.rewire(rewiring, 2.0)
        assert torch.equal(layer.values, wanted)
        assert layer.pattern is rewiring.after
        computes(layer)
        layer.set_pattern(another(layer))
        computes(layer)
        layer.set_pattern(another(layer), torch.randn(layer.pattern.values_shape))
        computes(layer)
        layer.load_state_dict(SparseLinear(48, 32, 0.3, layer.block_size).state_dict())
        computes(layer)
    assert addresses(layer) == before
    assert len(layer._state.index._derived) == 1  # small layers keep where their lines lie
    assert layer.values is parameter
    assert layer._state is not state


def test_index_matches_the_pattern(layer):
    layer.rewire(rewiring_on_device(layer))
    index, wanted = layer.index, layer.pattern.index
    for name in ("row_ptr", "cols", "col_ptr"):
        assert torch.equal(getattr(index, name), getattr(wanted, name))
    rows, slots = layer._state.index.column_order()
    assert torch.equal(rows, wanted.csc_rows)
    assert torch.equal(slots, wanted.csc_perm)


def test_earlier_patterns_do_not_share_the_index(layer):
    first = layer.pattern
    index = [tensor.clone() for tensor in first.index]
    layer.set_pattern(another(layer))
    assert all(torch.equal(a, b) for a, b in zip(index, first.index, strict=True))
    second = rewiring_on_device(layer).after
    on_device_positions = second._flat_on(torch.device("cpu")).clone()
    layer.rewire(rewiring_on_device(layer))
    # The layer's pattern is in its index, and takes a copy along where the CPU has none.
    made = rewiring_on_device(layer)
    layer.rewire(made)
    third = layer.pattern
    assert third._device_index[1] is layer.index.cols
    assert "cols" not in vars(third)
    held, none = layer.index.cols.clone(), torch.zeros(0, dtype=torch.int64)
    layer.rewire(rewire(third, none, none, row_major=True))
    assert third._device_index[1] is not layer.index.cols
    layer.rewire(rewiring_on_device(layer))
    assert torch.equal(held, third.cols)
    fourth = layer.pattern
    assert fourth.cols is not layer.index.cols
    layer.rewire(rewiring_on_device(layer))
    assert fourth._device_index is None
    assert torch.equal(second.flat, on_device_positions)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_update_between_forward_and_backward_raises(layer, autocast, frozen):
    layer.values.requires_grad_(not frozen)
    x = torch.randn(5, 48, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    layer.rewire(rewiring_on_device(layer))
    with pytest.raises(RuntimeError, match="have changed between forward and backward"):
        y.sum().backward()


def test_update_raises_with_saved_tensor_hooks(layer):
    x = torch.randn(5, 48, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = layer(x)
    layer.rewire(rewiring_on_device(layer))
    with pytest.raises(RuntimeError, match="have changed between forward and backward"):
        y.sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = layer(x)
    layer.rewire(rewiring_on_device(layer))
    with pytest.raises(RuntimeError, match="have changed"), torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()


def test_second_backward_raises_as_in_torch(layer):
    y = layer(torch.randn(5, 48))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_index_replaced_by_another_thread_raises(layer):
    state = layer._state
    layer.rewire(rewiring_on_device(layer))
    with pytest.raises(RuntimeError, match="changed by another thread"):
        products.forward(torch.randn(5, 48), state.memory, state.index, None)


def test_modified_index_raises(layer):
    layer.index.cols[0] = 3
    with pytest.raises(RuntimeError, match="the index of this layer was written to"):
        layer(torch.randn(5, 48))


def test_other_sizes_and_dtypes_use_new_memory(layer):
    layer.resizable = True
    layer.set_pattern(
        SparsePattern.random(layer.pattern.shape, nnz=10, block_size=layer.block_size)
    )
    computes(layer)
    layer.double()
    assert layer(torch.randn(2, 48, dtype=torch.float64)).dtype is torch.float64


def test_copies_and_averages(layer):
    average = copy.deepcopy(layer)
    assert not set(addresses(average)) & set(addresses(layer))
    follow_patterns(average, layer)
    layer.rewire(rewiring_on_device(layer))
    assert average.pattern == layer.pattern
    computes(average)
    computes(layer)


def test_dispatcher_uses_the_layers_index(layer):
    index = layer._state.index
    for _ in range(2):
        known = autograd.layer_index_of(layer.values, (*layer.index, None))
        assert known is layer._state.index
        layer.rewire(rewiring_on_device(layer))
    assert layer._state.index is not index
    other = torch.zeros(3, *layer.values.shape[1:])
    with pytest.raises(RuntimeError, match="values hold 3 blocks"):
        autograd.layer_index_of(other, (*layer.index, None))


def test_block_kernel_work_lists_follow_updates():
    layer = SparseLinear(64, 48, 0.4, 16)
    chunks = configurations.chunks(layer._state.index, 2)
    layer.rewire(rewiring_on_device(layer, 2))
    assert configurations.chunks(layer._state.index, 2) is chunks
    fresh = LayerIndex(layer.pattern.index, layer.values)
    assert torch.equal(chunks, configurations.chunks(fresh, 2))


def test_use_kernel_selects_block_kernels(monkeypatch):
    layer = SparseLinear(64, 48, 0.4, 16)
    assert layer.kernel(8) == "dense"
    with ops.use_kernel("blocks"):
        assert layer.kernel(8) == "dense"  # no GPU
        monkeypatch.setattr(blocks, "runs_triton", lambda device: True)
        assert layer.kernel(8) == "blocks"
        assert layer.kernel(8, dtype=torch.float64) == "dense"
        assert SparseLinear(64, 48, 0.4, 8).kernel(8) == "dense"


class RecordedLaunches:
    """A stand-in for the kernels that records the values of each launch."""

    def __init__(self):
        self.values = []

    def forward(self, x, values, p, bias):
        self.values.append(values)
        return x.new_zeros(len(x), p.out_features)

    def grad_input(self, dy, values, p):
        self.values.append(values)
        return dy.new_zeros(len(dy), p.in_features)

    def grad_weight(self, dy, x, p, dtype, sums=None):
        if sums is not None and x.element_size() == 2:
            sums.append(torch.full((p.out_features,), 3.0))
        return torch.zeros(p.values_shape, dtype=dtype)


@pytest.mark.parametrize("low", [False, True])
def test_values_are_cast_once_for_forward_and_backward(monkeypatch, low):
    launched = RecordedLaunches()
    monkeypatch.setattr(blocks, "runs_triton", lambda device: True)
    monkeypatch.setattr(blocks, "_launch", lambda: launched)
    layer = SparseLinear(64, 48, 0.4, 16)
    kind = torch.bfloat16 if low else torch.float32
    x = torch.randn(7, 64, dtype=kind, requires_grad=True)
    with ops.use_kernel("blocks"):
        layer(x).sum().backward()
        forward, backward = launched.values
        assert forward.dtype is kind
        # The kernel has made the gradient of the bias, but of float32.
        assert bool((layer.bias.grad == (3 if low else 7)).all())
        assert (forward is backward) == low  # float32 needs no copy
        assert forward.data_ptr() == backward.data_ptr()
        # What an optimizer does in between is seen by the next pass.
        with torch.no_grad():
            layer.values.add_(1)
        layer(x)
        assert torch.equal(launched.values[-1], layer.values.to(kind))
        # Another way back than forth takes nothing from there.
        y = layer(x)
        with ops.use_kernel("dense"):
            y.sum().backward()
        with ops.use_kernel("dense"):
            y = layer(x)
        y.sum().backward()


def test_cost_formula_chooses_block_kernels(monkeypatch):
    monkeypatch.setattr(blocks, "runs_triton", lambda device: True)
    sparse, full = (SparseLinear(2048, 2048, density, 64) for density in (0.1, 1.0))
    for backward in (False, True):
        for dtype in (torch.float16, torch.bfloat16):
            assert sparse.kernel(8192, backward=backward, dtype=dtype) == "blocks"
            assert full.kernel(8192, backward=backward, dtype=dtype) == "dense"
        with ops.use_kernel("dense"):
            assert sparse.kernel(8192, backward=backward) == "dense"
        with ops.use_kernel("blocks"):
            assert full.kernel(8192, backward=backward) == "blocks"
        # Kinds of the CPU leave the choice as it is.
        with ops.use_kernel("small"):
            assert sparse.kernel(8192, backward=backward) == "blocks"
    assert SparseLinear(2048, 2048, 0.1, 8).kernel(8192) == "dense"
    assert sparse.kernel(8192, dtype=torch.float64) == "dense"
    for batch in range(1, 200):  # remembered, but not without end
        sparse.kernel(batch)
    assert len(sparse._current().index.choices[0]) <= 64


@pytest.mark.parametrize("causal", [False, True])
def test_attention_off_the_cpu_uses_fused_sdpa_with_dropout(monkeypatch, causal):
    seen = []
    fused = attention.scaled_dot_product_attention
    monkeypatch.setattr(
        attention,
        "scaled_dot_product_attention",
        lambda *args: seen.append(args[3:]) or fused(*args),
    )
    layer = SparseMultiheadAttention(16, 2, dropout=0.5, batch_first=True, device="meta")
    x = torch.empty(3, 5, 16, device="meta")
    y, weights = layer(x, x, x, need_weights=False, is_causal=causal)
    assert y.shape == x.shape
    assert weights is None
    assert seen == [(None, 0.5, causal)]


def test_layers_that_share_a_pattern():
    """Two of three layers with one pattern change; all is prepared before one of them changes."""
    first = SparseLinear(48, 32, 0.3, 4)
    first, second, third = layers = [first, copy.deepcopy(first), copy.deepcopy(first)]
    for layer in layers:
        computes(layer)
    shared = rewiring_on_device(first)
    for layer in reversed(layers):
        layer.rewire(shared)
    assert first.pattern is second.pattern is third.pattern
    wanted = shared.after.flat
    switches = [layer.prepare(rewiring_on_device(layer)) for layer in (first, second)]
    for switch in switches:
        switch()
    assert torch.equal(third.pattern._flat_on(torch.device("cpu")), wanted)
    computes(third)
