"""The gradient used for growth: of the last step, or its momentum."""

import warnings

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse import SparsePattern
from dynsparse.nn import SparseLinear
from dynsparse.ops import capture
from dynsparse.training import DenseMomentum, LastStep, RigL, WindowMomentum
from dynsparse.training.history import gradient_at


def steps(count, generator, micro_batches=1):
    return [
        [
            (
                torch.randn(3 + k, 8, generator=generator, dtype=torch.float64),
                torch.randn(3 + k, 6, generator=generator, dtype=torch.float64),
            )
            for k in range(micro_batches)
        ]
        for _ in range(count)
    ]


def dense(pairs):
    return sum(dy.t() @ x for x, dy in pairs)


@pytest.mark.parametrize("b", [1, 2])
def test_gradient_at_equals_dense(b, generator):
    pairs = steps(1, generator, micro_batches=3)[0]
    pattern = SparsePattern.random((6, 8), 0.4, block_size=b, generator=generator)
    torch.testing.assert_close(gradient_at(pairs, pattern), pattern.values_of(dense(pairs)))
    low = [(x.bfloat16(), dy.bfloat16()) for x, dy in pairs]
    found = gradient_at(low, pattern)
    assert found.dtype == torch.float32
    expected = pattern.values_of(dense([(x.float(), dy.float()) for x, dy in low]))
    torch.testing.assert_close(found, expected)
    empty = SparsePattern([], [], shape=(6, 8), block_size=b)
    assert gradient_at(pairs, empty).shape == empty.values_shape
    with pytest.raises(ValueError, match="expected at least one pair"):
        gradient_at([], pattern)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: LastStep(), [0, 0, 0, 0, 1]),
        (lambda: WindowMomentum(0.5, 3), [0, 0, 0.25, 0.5, 1]),
        (lambda: WindowMomentum(0.5, 9), [0.0625, 0.125, 0.25, 0.5, 1]),
        (lambda: DenseMomentum(0.5), [0.0625, 0.125, 0.25, 0.5, 1]),
    ],
)
def test_momentum_is_a_weighted_sum_of_gradients(make, expected, micro_batches, generator):
    history, seen = make(), steps(5, generator, micro_batches)
    assert not history.has("fc")
    for pairs in seen:
        history.observe("fc", pairs)
    assert history.has("fc")
    assert not history.has("other")
    wanted = sum(share * dense(pairs) for share, pairs in zip(expected, seen, strict=True))
    torch.testing.assert_close(dense(history.pairs("fc")), wanted)
    pattern = SparsePattern.random((6, 8), 0.5, generator=generator)
    torch.testing.assert_close(history.at("fc", pattern), pattern.values_of(wanted))
    again = make()
    again.load_state_dict(history.state_dict())
    if not isinstance(history, LastStep):
        assert torch.equal(again.at("fc", pattern), history.at("fc", pattern))
        history.end_update()
        assert history.has("fc")


def test_window_keeps_a_limited_number_of_steps(generator):
    history = WindowMomentum(0.9, 4)
    for pairs in steps(9, generator):
        history.observe("fc", pairs)
    assert len(history.pairs("fc")) == 4
    assert sum(x.numel() + dy.numel() for x, dy in history.pairs("fc")) == 4 * 3 * (8 + 6)


def test_input_buffers_may_be_reused(generator):
    history, momentum = WindowMomentum(0.5, 3), torch.zeros(6, 8, dtype=torch.float64)
    buffer = [torch.empty(3, 8, dtype=torch.float64), torch.empty(3, 6, dtype=torch.float64)]
    for pairs in steps(3, generator):
        for own, given in zip(buffer, pairs[0], strict=True):
            own.copy_(given)
        history.observe("fc", [tuple(buffer)])
        momentum = 0.5 * momentum + dense(pairs)
    torch.testing.assert_close(dense(history.pairs("fc")), momentum)


@pytest.mark.parametrize(
    ("window", "captured"),
    [(3, [8, 9, 10, 18, 19, 20, 28, 29, 30]), (10, range(1, 31)), (None, range(1, 31))],
)
def test_gradients_are_captured_within_the_window(window, captured):
    layer = SparseLinear(8, 8, density=0.3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    # T_end is 37.5: the last update is at step 30.
    trainer = ds.SNFS(layer, optimizer, total_steps=50, update_interval=10, window=window)
    found = []
    for step in range(1, 51):
        layer(torch.randn(2, 8)).sum().backward()
        if capture.is_open(layer.index.row_ptr):
            found.append(step)
        trainer.step()
    assert found == list(captured)


def test_layer_used_earlier_in_the_window_is_updated():
    model = nn.Sequential(SparseLinear(8, 8, density=0.3), SparseLinear(8, 8, density=0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ds.SNFS(model, optimizer, total_steps=50, update_interval=4, window=4)
    for step in range(4):
        x = torch.randn(3, 8)
        (model(x) if step < 2 else model[1](x)).square().sum().backward()
        rewirings = trainer.step()
    assert list(rewirings) == ["0", "1"]


def test_loaded_history_moves_to_the_layers_device():
    """States are loaded on the CPU; meta tensors stand for those of a device."""
    here = torch.randn(3, 4), torch.randn(3, 6)
    there = tuple(tensor.to("meta") for tensor in here)
    for made in (WindowMomentum(), DenseMomentum()):
        made.observe("fc", [here])
        resumed = type(made)()
        resumed.load_state_dict(made.state_dict())
        resumed.observe("fc", [there])
        pairs = resumed.pairs("fc")
        assert {tensor.device.type for pair in pairs for tensor in pair} == {"meta"}
        assert dense(pairs).shape == (6, 4)


@pytest.mark.parametrize("way", ["create_graph", "replaced"])
def test_gradients_that_are_made_anew_count(way):
    """`create_graph=True` adds up gradients in new tensors, and so may code between the passes."""

    def grown(way):
        torch.manual_seed(0)
        layer = SparseLinear(32, 64, density=0.2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        trainer = RigL(layer, optimizer, total_steps=100, update_interval=1)
        for i in range(4):
            x = torch.randn(16, 32) * (10 if i == 1 else 1)
            loss = (layer(x).tanh() ** 2 @ torch.arange(64.0)).sum()
            loss.backward(create_graph=way == "create_graph")
            if way == "replaced":
                layer.values.grad = layer.values.grad * 1.0
        (rewiring,) = trainer.step().values()
        return rewiring.after

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        assert grown(way) == grown("in place")


@pytest.mark.parametrize("other", ["backward", "autograd.grad"])
def test_passes_before_gradients_are_set_to_zero_are_discarded(other):
    """Also those of `autograd.grad`, which leave the gradient of the step before to be zeroed."""

    def grown(other):
        torch.manual_seed(0)
        layer = SparseLinear(16, 16, density=0.2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        trainer = RigL(layer, optimizer, total_steps=100, update_interval=1)
        x, patterns = torch.randn(8, 16), []
        for wanted, discarded in torch.randn(3, 2, 8, 16):
            loss = 30 * (layer(x) * discarded).sum()
            if other == "backward":
                loss.backward()
            elif other == "autograd.grad":
                torch.autograd.grad(loss, layer.values)
            optimizer.zero_grad(set_to_none=False)
            (layer(x) * wanted).sum().backward()
            (rewiring,) = trainer.step().values()
            patterns.append(rewiring.after)
        return patterns

    assert grown(other) == grown(None)
