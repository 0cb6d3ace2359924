"""Parts of benchmarks/circuits.py, compared with hand-computed cases."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import circuits


@pytest.fixture
def model():
    torch.manual_seed(0)
    return circuits.example.make("rigl", 0.1, 100, 32, 2, 4, 0.25)[0]


@pytest.fixture
def batches():
    return circuits.list_batches(circuits.make_text(400, 0), 2, 0)


def test_positions_of_a_task_in_the_text():
    text = '"ab"\n\'c\'\n[[d]]\n"e"\n[fg]\n[[h]]\n'
    tokens = torch.tensor([list(text.encode())])
    chosen = {}
    for task, find in circuits.TASKS.items():
        at, choice = find(tokens)
        assert at.shape == (1, len(text) - 1)
        chosen[task] = [(int(i), chr(tokens[0, i + 1])) for i in at[0].nonzero()]
        assert all(ord(byte) in choice for _, byte in chosen[task])
    # The first line may have begun before the sequence.
    assert chosen["quotes"] == [(text.index("c"), "'"), (text.index("e"), '"')]
    ends = [text.index(letter) + 1 for letter in "dgh"]
    assert chosen["brackets"] == list(zip(ends, "]\n]", strict=True))


def test_open_gates_keep_values_and_closed_gates_give_the_mean(model, batches):
    means = circuits.mean_activations(model, batches)
    gates = circuits.Gates(means)
    for task in circuits.TASKS:
        plain = circuits.loss_of_task(model, batches[0], task, lambda name, x: x)
        torch.testing.assert_close(circuits.loss_of_task(model, batches[0], task, gates), plain)
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        gates.of("head reads")[1:] = -1.0
    out = gates("head reads", x)
    torch.testing.assert_close(out[..., 0], x[..., 0])
    torch.testing.assert_close(out[..., 1:], means["head reads"][1:].expand(2, 3, 31))
    assert gates.count() == sum(len(mean) for mean in means.values()) - 31


def test_edges_between_open_gates(model, batches):
    gates = circuits.Gates(circuits.mean_activations(model, batches))
    layers = [
        layer for block in model.blocks for layer in (block.qkv, block.out, block.up, block.down)
    ]
    assert circuits.edges_of(model, gates) == sum(layer.pattern.nnz for layer in layers)
    with torch.no_grad():
        for name in gates.names:
            gates.of(name).fill_(-1.0)
        assert circuits.edges_of(model, gates) == 0
        # One neuron of the last MLP, read by the head in one channel.
        down = circuits.weight_of(model.blocks[1].down)
        channel, neuron = down.nonzero()[0]
        gates.of("1 MLP")[neuron] = gates.of("head reads")[channel] = 1.0
        assert circuits.edges_of(model, gates) == 1
        gates.of("1 MLP reads").fill_(1.0)
        up = circuits.weight_of(model.blocks[1].up)[neuron]
        assert circuits.edges_of(model, gates) == 1 + int((up != 0).sum())


def test_minimum_number_of_gates_below_the_limit(model, batches, monkeypatch):
    gates = circuits.Gates(circuits.mean_activations(model, batches))
    monkeypatch.setattr(circuits, "LIMIT", 10.0)
    circuits.close_smallest(model, gates, batches, "quotes")
    assert gates.count() >= 1
    monkeypatch.setattr(circuits, "LIMIT", 1e-3)
    assert circuits.find_circuit(model, circuits.make_text(400, 1), "quotes", 1, 0) is None
