"""Training on CIFAR-10: network, augmentation, all methods, resuming, bad options."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from saved_states import assert_equal, state
from torch import nn

from dynsparse.apps.image_classification.cifar import (
    CifarTraining,
    Network,
    Options,
    build_network,
    run,
    shift,
)
from dynsparse.apps.image_classification.training import learning_rate
from dynsparse.cli.app import run as command
from dynsparse.data import load
from dynsparse.data.images import DataSet, LabelledImages
from dynsparse.nn import SparseLinear
from dynsparse.training.records import Records

QUIET = Console(quiet=True)
TINY = {
    "dataset": "cifar-10", "depth": 10, "width": 1, "batch_size": 20, "epochs": 2, "seed": 7,
    "steps_per_epoch": 2, "update_interval": 2, "sparsity": 0.8,
}  # fmt: skip
MEAN, DEVIATION = torch.full((3,), 120.0), torch.full((3,), 60.0)


@pytest.fixture
def folder(tmp_path):
    """Write CIFAR-10 files with a few images, in which a class is a shade of one colour."""
    rng = np.random.default_rng(0)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    for name in (*names, "test_batch.bin"):
        found = rng.integers(0, 60, (12, 3073), dtype=np.uint8)
        found[:, 0] = rng.integers(0, 10, 12)
        found[:, 1:1025] += 19 * found[:, :1]
        (tmp_path / name).write_bytes(found.tobytes())
    return tmp_path


def tiny(folder, **changes):
    return run(Options(**{**TINY, "data_dir": folder, **changes}), QUIET)


def sparse(network):
    return {n: m for n, m in network.named_modules() if isinstance(m, SparseLinear)}


def test_network_of_the_paper(generator):
    """WideResNet-22-2: 22 layers with weights, and three 1x1 shortcuts."""
    network = Network(22, 2, MEAN, DEVIATION)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert sum(c.kernel_size == (3, 3) for c in convolutions) == 19
    assert sum(c.kernel_size == (1, 1) for c in convolutions) == 3
    assert [b.conv1.stride[0] for b in network.blocks] == [1, 1, 1, 2, 1, 1, 2, 1, 1]
    assert [b.conv2.out_channels for b in network.blocks] == [32] * 3 + [64] * 3 + [128] * 3
    network = build_network(Options(sparsity=0.9), MEAN, DEVIATION, generator)
    assert type(network.first) is nn.Conv2d
    layers = [*network.blocks.modules(), network.output]
    held = total = 0
    for layer in layers:
        if isinstance(layer, SparseLinear):
            held, total = held + layer.pattern.nnz, total + layer.pattern.total
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            held, total = held + layer.weight.numel(), total + layer.weight.numel()
    # 3x3 in the groups: 4,608 + 5 x 9,216, and so on; 1x1 beside them; the last layer.
    groups = [9 * (a * b + 5 * b * b) + a * b for a, b in ((16, 32), (32, 64), (64, 128))]
    assert total == sum(groups) + 128 * 10
    assert held == round(0.1 * total)


def test_forward_equals_dense_torch(generator):
    options = Options(depth=10, width=1, sparsity=0.7)
    network = build_network(options, MEAN, DEVIATION, generator).double().eval()
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=generator)

    def weight(layer):
        return layer.to_dense() if isinstance(layer, SparseLinear) else layer.weight

    x = F.conv2d((images.double() - 120) / 60, weight(network.first), padding=1)
    for block, (stride, side) in zip(
        network.blocks, ((1, False), (2, True), (2, True)), strict=True
    ):
        y = block.norm1(x).relu()
        around = F.conv2d(y, weight(block.shortcut), stride=stride) if side else x
        y = F.conv2d(y, weight(block.conv1), stride=stride, padding=1)
        x = around + F.conv2d(block.norm2(y).relu(), weight(block.conv2), padding=1)
    x = network.norm(x).relu().mean((2, 3))
    expected = x @ weight(network.output).t() + network.output.bias
    torch.testing.assert_close(network(images), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block", [4, 16])
def test_blocks_are_over_channels(block, generator):
    network = build_network(
        Options(depth=10, width=1, block_size=block, sparsity=0.5), MEAN, DEVIATION, generator
    )
    layers = sparse(network)
    assert layers
    assert {layer.block_size for layer in layers.values()} == {block}
    assert type(network.output) is nn.Linear


def test_images_are_shifted_and_mirrored():
    images = torch.randint(0, 256, (40, 3, 9, 9), dtype=torch.uint8)
    by = torch.randint(-4, 5, (40, 2))
    mirror = torch.rand(40) < 0.5
    padded = F.pad(images.float(), [4] * 4, mode="reflect")
    for got, image, (down, right), turned in zip(
        shift(images, by, mirror), padded, by.tolist(), mirror.tolist(), strict=True
    ):
        expected = image[:, 4 + down : 13 + down, 4 + right : 13 + right]
        expected = expected.flip(2) if turned else expected
        assert torch.equal(got.float(), expected)


def test_digits_have_the_same_format():
    digits = load("digits")
    training = CifarTraining(Options(**{**TINY, "dataset": "digits"}), digits, 0)
    images = training.arrange(digits.test.images)
    assert images.shape == (360, 3, 32, 32)
    assert images.dtype == torch.uint8
    inner = images[:, 1, 2:30, 2:30].flatten(1).float() / 255
    torch.testing.assert_close(inner, digits.test.images, rtol=0, atol=0.5 / 255 + 1e-6)
    shown = training.augment_images(images[:5], torch.arange(5))
    assert torch.equal(shown, images[:5])


def test_inputs_are_normalized():
    images = torch.randint(0, 200, (50, 3072), dtype=torch.uint8)
    images[:, :1024] //= 2
    train = LabelledImages(images, torch.randint(0, 10, (50,)))
    training = CifarTraining(Options(**TINY), DataSet("cifar-10", train, train), 0)
    network = training.model
    x = (images.view(-1, 3, 32, 32) - network.mean) / network.deviation
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3), rtol=0, atol=1e-5)


def test_learning_rates_of_the_paper():
    """0.1, divided by five every 30,000 of 97,656 steps."""
    options = Options()
    rates = [learning_rate(options, step, 97_656) for step in (0, 29_999, 30_000, 60_000, 97_655)]
    assert rates == pytest.approx([0.1, 0.1, 0.02, 0.004, 0.0008])


# What the others differ in is tested with the algorithms.
@pytest.mark.parametrize("method", ["rigl", "granet", "dense"])
def test_methods_train(method, folder):
    figures = tiny(folder, method=method)
    assert figures["steps"] == 6
    assert np.isfinite(figures["train_loss"])
    assert (figures["updates"] > 0) == (method != "dense")
    assert figures["density"] == pytest.approx(1.0 if method == "dense" else 0.2, abs=0.02)


def test_it_trains_in_float16(folder):
    exact, half = (tiny(folder, data_type=kind) for kind in ("float32", "float16"))
    assert half["skipped"] == 0 < half["updates"] == exact["updates"]
    assert half["train_loss"] == pytest.approx(exact["train_loss"], rel=0.01)


def test_it_learns_the_shades(folder):
    figures = tiny(folder, epochs=15, augment="move", learning_rate=0.05)
    assert figures["train_accuracy"] > 0.3


def test_resume_is_exact(folder, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    more = {"checkpoint_freq": 1, "records_path": tmp_path / "record"}
    tiny(folder, checkpoint_path=whole)
    tiny(folder, checkpoint_path=halves, stop_after=1, **more)
    torch.manual_seed(99)
    tiny(folder, checkpoint_path=halves, restore=halves, records_path=tmp_path / "record")
    first, second = (state(path / "epoch-0002.ckpt") for path in (whole, halves))
    for part in ("model", "optimizer"):
        assert_equal(first[part], second[part], part)
    patterns = Records.load(tmp_path / "record")
    assert patterns.pattern("blocks.0.conv1", -1).nnz


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--depth 20", "--depth: expected 6 n + 4, such as 10, 16, 22 or 28, got 20"),
        ("--dataset digits --data-dir .", "or choose --dataset cifar-10"),
        ("--data-dir .", "expected cifar-10-binary.tar.gz, or test_batch.bin"),
    ],
)
def test_bad_options_print_one_line(line, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(["cifar", *line.split()]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
