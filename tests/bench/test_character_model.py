"""benchmarks/character_model.py: its GRU is torch's, and every method trains what it says."""

import argparse
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import character_model


def test_the_gru_is_that_of_torch():
    torch.manual_seed(0)
    model = character_model.CharacterModel(0.1).double()
    gru = nn.GRU(13, 51, batch_first=True).double()
    for ours, name in ((model.from_input, "ih"), (model.from_state, "hh")):
        ours.weight, ours.bias = getattr(gru, f"weight_{name}_l0"), getattr(gru, f"bias_{name}_l0")
    x = torch.randn(3, 9, 13, dtype=torch.float64)
    torch.testing.assert_close(model.recur(x), gru(x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", character_model.METHODS)
def test_methods(method):
    args = argparse.Namespace(steps=8, length=4, interval=2)
    text = torch.arange(3000, dtype=torch.int32).remainder(7).to(torch.uint8)
    row = character_model.train(method, 0, text, text, args)
    assert row["valid"] == row["curve"][-1] < row["curve"][0] < 8.5
    dense = 1_183_360  # parameters of the dense network
    sparse = dense - 0.75 * (1536 * (128 + 512) + 256 * 512 + 128 * 256)
    expected = dense if method == "dense" else sparse
    assert row["parameters"] == pytest.approx(expected, rel=0.01 if method == "small" else 0)


@pytest.mark.parametrize(("method", "moves"), [("static", False), ("set", True), ("rigl", True)])
def test_patterns(method, moves):
    model, trainer = character_model.make(method, 0, 8, 2)
    before = model.from_state.pattern.to_mask()
    tokens = torch.arange(256).view(4, 64)
    for _ in range(2):
        character_model.loss_of(model, (tokens, tokens)).backward()
        trainer.step()
    assert torch.equal(model.from_state.pattern.to_mask(), before) != moves
