"""Parts of examples/weight_sparse_gpt.py, compared with hand-computed cases and each other."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import dynsparse as ds

PARTS = runpy.run_path(
    str(Path(__file__).resolve().parents[1] / "examples" / "weight_sparse_gpt.py")
)


def test_only_the_largest_magnitudes_stay_and_get_gradients():
    x = torch.tensor([[1.0, -4.0, 2.0, -3.0]], requires_grad=True)
    y = PARTS["AbsTopK"](0.5)(x)
    assert y.tolist() == [[0, -4, 0, -3]]
    (y * torch.tensor([1.0, 2, 3, 4])).sum().backward()
    assert x.grad.tolist() == [[0, 2, 0, 4]]


def test_largest_weights_stay():
    weight = torch.tensor([[5.0, -4.0, 1.0], [0.5, 0.2, -0.1]])
    PARTS["keep_largest"](weight, 2)
    assert weight.tolist() == [[5, -4, 0], [0, 0, 0]]


def test_every_neuron_keeps_a_weight_in_and_out():
    weight = torch.tensor([[5.0, -4.0, 1.0], [0.5, 0.2, -0.1]])
    PARTS["keep_largest"](weight, 2, least=1)
    assert weight.tolist() == [[5, -4, 1], [0.5, 0, 0]]  # the best of columns and of the second row


def test_the_largest_weights_of_every_neuron_are_dropped_last():
    layer = ds.nn.SparseLinear.from_dense(nn.Linear(3, 2, bias=False), density=1)
    with torch.no_grad():
        layer.values.copy_(torch.tensor([5.0, -4.0, 1.0, 0.5, 0.2, -0.1]))
    scores = PARTS["DropScore"](layer, 1)(layer.values)
    assert scores.tolist() == pytest.approx([10, 9, 6, 5.5, 0.2, 0.1])
    assert torch.equal(PARTS["DropScore"](layer, 0)(layer.values), layer.values.abs())


@pytest.mark.parametrize("method", ["rigl", "gmp"])
def test_neurons_keep_their_largest_weights(method):
    """The three largest weights of every row and column are present after an update."""
    torch.manual_seed(0)
    model, trainer = PARTS["make"](method, 0.25, 40, 64, 1, 4, 0.25, least=3)
    trainer.optimizer.param_groups[0]["lr"] = 0.0  # weights stay between updates
    before = {name: layer.to_dense().detach() for name, layer in trainer.layers.items()}
    while not trainer.updates:
        model(torch.randint(256, (2, 129))).backward()
        trainer.step()
    for name, layer in trainer.layers.items():
        after = layer.to_dense().detach()
        assert ((before[name] != 0) & (after == 0)).any()
        for dim in (0, 1):
            best = before[name].abs().topk(3, dim)
            assert after.gather(dim, best.indices)[best.values > 0].all()


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("method", ["rigl", "gmp", "keep"])
def test_final_number_of_weights(method, embeddings):
    torch.manual_seed(0)
    steps, width = 40, 64
    model, trainer = PARTS["make"](method, 0.1, steps, width, 1, 4, 0.25, embeddings=embeddings)
    tokens = torch.randint(256, (2, 129))
    losses = []
    for _ in range(steps):
        loss = model(tokens)
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    assert losses[-1] < (0.8 if embeddings else 0.7) * losses[0]
    for part in (model if embeddings else model.blocks).modules():
        if method == "keep" and isinstance(part, (nn.Linear, nn.Embedding)):
            total, count = part.weight.numel(), int((part.weight != 0).sum())
            # At least 4 of each row and column.
            assert 0.1 * total - 1 <= count <= 0.1 * total + 4 * sum(part.weight.shape)
        elif method != "keep" and hasattr(part, "values"):
            count = int((part.values != 0).sum())
            assert count == pytest.approx(0.1 * part.pattern.total, abs=1)
