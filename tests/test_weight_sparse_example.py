"""The parts of examples/weight_sparse_gpt.py, by hand and against each other."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

PARTS = runpy.run_path(
    str(Path(__file__).resolve().parents[1] / "examples" / "weight_sparse_gpt.py")
)


def test_the_largest_magnitudes_stay_and_alone_have_a_gradient():
    x = torch.tensor([[1.0, -4.0, 2.0, -3.0]], requires_grad=True)
    y = PARTS["AbsTopK"](0.5)(x)
    assert y.tolist() == [[0, -4, 0, -3]]
    (y * torch.tensor([1.0, 2, 3, 4])).sum().backward()
    assert x.grad.tolist() == [[0, 2, 0, 4]]


def test_the_largest_weights_stay():
    weight = torch.tensor([[5.0, -4.0, 1.0], [0.5, 0.2, -0.1]])
    PARTS["keep_largest"](weight, 2)
    assert weight.tolist() == [[5, -4, 0], [0, 0, 0]]


def test_every_neuron_keeps_a_weight_in_and_out():
    weight = torch.tensor([[5.0, -4.0, 1.0], [0.5, 0.2, -0.1]])
    PARTS["keep_largest"](weight, 2, least=1)
    assert weight.tolist() == [[5, -4, 1], [0.5, 0, 0]]  # the best of columns and of the second row


@pytest.mark.parametrize("method", ["rigl", "gmp", "keep"])
def test_a_training_ends_with_so_many_weights(method):
    torch.manual_seed(0)
    steps, width = 40, 64
    model, trainer = PARTS["make"](method, 0.1, steps, width, 1, 4, 0.25)
    tokens = torch.randint(256, (2, 129))
    losses = []
    for _ in range(steps):
        loss = model(tokens)
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    for part in model.blocks.modules():
        weight = getattr(part, "values", None)
        if isinstance(part, nn.Linear):
            weight = part.weight
        if weight is None:
            continue
        count = int((weight != 0).sum())
        wanted = 0.1 * part.in_features * part.out_features
        if method == "keep":  # at least 4 of each row and column
            assert wanted - 1 <= count <= wanted + 4 * (part.in_features + part.out_features)
        else:
            assert count == pytest.approx(wanted, abs=1)
