"""The MNIST transformer: equality with dense torch, small trainings, bad options."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from dynsparse.apps.image_classification.transformer import (
    Options,
    TransformerTraining,
    build_network,
    position_encoding,
    run,
)
from dynsparse.cli.app import run as command
from dynsparse.data import load
from dynsparse.nn import SparseLinear
from dynsparse.ops import capture
from dynsparse.training.records import Records

QUIET = Console(quiet=True)
TINY = {
    "batch_size": 128,
    "epochs": 1,
    "steps_per_epoch": 3,
    "seed": 7,
    "attention_heads": 4,
    "qkv_length": 8,
}


def tiny(**changes):
    return run(Options(**{**TINY, **changes}), QUIET)


def sparse(network):
    return {n: m for n, m in network.named_modules() if isinstance(m, SparseLinear)}


def test_sizes_of_the_original(generator):
    layers = sparse(build_network(Options(), generator))
    attention = {f"layers.0.attention.{p}_proj": (512, 96) for p in "qkv"}
    assert {name: layer.pattern.shape for name, layer in layers.items()} == {
        "input": (96, 28),
        **attention,
        "layers.0.attention.out_proj": (96, 512),
        "layers.0.linear1": (48, 96),
        "layers.0.linear2": (96, 48),
        "output": (10, 96),
    }
    assert all(layer.density == pytest.approx(0.1, abs=1e-3) for layer in layers.values())
    assert layers["output"].bias is None


@pytest.mark.parametrize("block", [4, 8, 16])
def test_blocks_pad_the_image_and_the_classes(block, generator):
    net = build_network(Options(block_size=block, sparsity=0.5), generator)
    assert net.input.in_features == math.ceil(28 / block) * block
    assert net.output.out_features == math.ceil(10 / block) * block
    assert {layer.block_size for layer in sparse(net).values()} == {block}
    assert net(torch.rand(3, 784)).shape == (3, 10)


@pytest.mark.slow
def test_large_blocks_train():
    sizes = {"hidden_length": 64, "ff_length": 128, "attention_heads": 4, "qkv_length": 16}
    figures = tiny(block_size=64, sparsity=0.5, epochs=4, **sizes)
    assert figures["accuracy"] > 0.15
    assert figures["replaced"] > 0


def test_forward_equals_dense_torch(generator):
    options = Options(block_size=4, sparsity=0.5, attention_heads=3, qkv_length=8)
    net = build_network(options, generator).double().eval()
    images = torch.rand(5, 784, dtype=torch.float64)

    x = torch.cat([images.view(5, 28, 28)], -1) + position_encoding(28, 28)
    x = x @ net.input.to_dense().T + net.input.bias
    layer = net.layers[0]
    attention = layer.attention

    def project(name, y):
        part = getattr(attention, name)
        return y @ part.to_dense().T + part.bias

    y = nn.functional.layer_norm(x, (96,))
    q, k, v = (project(f"{p}_proj", y).view(5, 28, 3, 8) for p in "qkv")
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(8)
    mixed = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).reshape(5, 28, 24)
    x = x + project("out_proj", mixed)
    y = nn.functional.layer_norm(x, (96,))
    y = nn.functional.gelu(y @ layer.linear1.to_dense().T + layer.linear1.bias)
    x = x + y @ layer.linear2.to_dense().T + layer.linear2.bias
    expected = (x @ net.output.to_dense().T).sum(1)[:, :10]
    torch.testing.assert_close(net(images), expected, rtol=1e-9, atol=1e-9)


def test_positional_encoding_distinguishes_tokens():
    positions = position_encoding(28, 32)
    torch.testing.assert_close(positions.mean(1), torch.zeros(28), rtol=0, atol=1e-6)
    torch.testing.assert_close(positions.std(1, correction=0), torch.ones(28))
    distance = torch.cdist(positions, positions) + torch.eye(28)
    assert distance.min() > 0.1


def test_the_dense_network_is_dense(generator):
    for options in (Options(method="dense"), Options(sparsity=0)):
        net = build_network(options, generator)
        assert not sparse(net)
        assert sum(isinstance(m, nn.Linear) for m in net.modules()) == 8
    assert tiny(method="dense")["density"] == 1.0


@pytest.mark.parametrize("block", [1, 8])
def test_growth_sees_the_dense_gradient_of_every_layer(block):
    """The pairs that growth gets give the gradient of the dense weights, layer by layer."""
    options = Options(**TINY, block_size=block, sparsity=0.5, dropout_keep_prob=1.0)
    training = TransformerTraining(options, load("digits"), 0)
    net = training.model.double()
    images = torch.rand(4, 784, dtype=torch.float64)
    layers = sparse(net)
    held = {
        name: capture.start(layer.index.row_ptr, layer.values) for name, layer in layers.items()
    }
    net(images).square().sum().backward()
    got = {name: list(pairs) for name, pairs in held.items()}
    for name, layer in layers.items():
        dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        dense.weight = nn.Parameter(layer.to_dense().detach())
        dense.bias = layer.bias
        net.set_submodule(name, dense)
    net(images).square().sum().backward()
    for name in layers:
        gradient = sum(dy.T @ x for x, dy in got[name])
        weight = net.get_submodule(name).weight
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("changes", [
    {"method": "rigl"},
    {"method": "set"},
    {"method": "rigl", "block_size": 8, "sparsity": 0.5, "pooling_type": "SUM"},
    {"data_type": "bfloat16", "exclude_attention_biases": True, "encoder_layers": 2},
    {"data_type": "float16"},
], ids=str)  # fmt: skip
def test_every_layer_changes_its_pattern(changes, tmp_path):
    figures = tiny(records_path=tmp_path, prune_ratio=0.5, **changes)
    assert figures["updates"] == 2  # every fourth of 12 steps, but not after the last
    records = Records.load(tmp_path)
    assert len(records.layers) == len(figures["layers"]) == 2 + 6 * changes.get("encoder_layers", 1)
    for name in records.layers:
        assert records.churn(name).any()


def test_it_learns_digits():
    figures = run(
        Options(epochs=3, seed=1, block_size=4, sparsity=0.5, encoder_layers=1, qkv_length=8),
        QUIET,
    )
    assert figures["accuracy"] > 0.6


def test_the_command(capsys, tmp_path):
    arguments = (
        "mnist-transformer --sparsity 0.5 --block-size 8 --pooling-type SUM --batch-size 256 "
        "--attention-heads 2 --qkv-length 8 --steps-per-epoch 2 --seed 1 --exclude-attention-biases"
    )
    path = tmp_path / "a.json"
    status = command([*arguments.split(), "--json", str(path), "--log", str(tmp_path / "log")])
    out = capsys.readouterr()
    assert (status, out.err) == (0, "")
    assert "test accuracy" in out.out
    figures = json.loads(path.read_text())
    assert {"accuracy", "loss", "density", "epochs", "seconds", "updates"} <= figures.keys()
    assert figures["density"] == pytest.approx(0.5, abs=0.01)
    assert (tmp_path / "log").read_text().startswith("Iteration Sparsity_0.5\n")


WRONG = [
    ("--dropout-keep-prob 0", "--dropout-keep-prob: expected a number above 0 and up to 1, got 0"),
    ("--block-size 32", "--block-size 32: expected it to divide --ff-length, got 48"),
    ("--block-size 16 --hidden-length 100", "expected it to divide --hidden-length, got 100"),
    ("--block-size 8 --qkv-length 1 --attention-heads 3", "--attention-heads times --qkv-length"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_bad_options_print_one_line(capsys, arguments, message):
    assert command(["mnist-transformer", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "least"),
    [({}, 0.93), ({"sparsity": 0.5, "block_size": 8, "pooling_type": "SUM"}, 0.95)],
    ids=["elements", "blocks"],
)
def test_one_epoch_of_mnist(changes, least):
    folder = os.environ.get("DYNSPARSE_DATA_DIR")
    if not folder:
        pytest.skip("DYNSPARSE_DATA_DIR is not set")
    options = Options(dataset="mnist", data_dir=Path(folder), seed=0, **changes)
    assert run(options, QUIET)["accuracy"] >= least
