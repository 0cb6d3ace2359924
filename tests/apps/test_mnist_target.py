"""`--target`: training steps on a simulated tile machine equal those of the host."""

import json

import pytest
import torch
from rich.console import Console
from saved_states import assert_equal, state

from dynsparse import data
from dynsparse.apps import lm
from dynsparse.apps.image_classification import mnist, transformer
from dynsparse.apps.lm.corpus import load_corpus
from dynsparse.apps.lm.training import Training as LmTraining
from dynsparse.cli.app import run
from dynsparse.nn import SparseLinear

QUIET = Console(quiet=True)
MACHINE = {"target": "bow", "tiles": 8}
# 32 images: four batches.
FEW = {"hold_out": 1405, "batch_size": 8, "steps_per_epoch": 4, "update_interval": 2, "epochs": 1}
SHORT = [
    "mnist", "--hidden-sizes", "16", "--hold-out", "1413", "--batch-size", "8", "--epochs", "1",
    "--steps-per-epoch", "3", "--update-interval", "2", "--seed", "0",
]  # fmt: skip


def weights(model):
    """Return dense weights and other parameters by name; slots may be in any order."""
    dense = {
        f"{name}.weight": layer.to_dense().detach()
        for name, layer in model.named_modules()
        if isinstance(layer, SparseLinear)
    }
    return dense | {n: p.detach() for n, p in model.named_parameters() if not n.endswith("values")}


def check_equal(host, machine, windows):
    """Train both; losses of every window and final weights must agree within 1e-5."""
    for one, other in zip(windows(host), windows(machine), strict=True):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-5)
    machine.collect_weights()
    expected, found = weights(host.model), weights(machine.model)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5)
    assert machine.step == host.step
    assert machine.updates == host.updates
    assert machine.replaced == host.replaced
    for name, layer in host.trainer.layers.items() if host.trainer else ():
        assert machine.trainer.layers[name].pattern.to_mask().equal(layer.pattern.to_mask())


def check_images(kind, module, **changes):
    options = {**FEW, **changes}
    images = data.load("digits", None).hold_out(options["hold_out"])
    made = [kind(module.Options(**options, **target), images, 7) for target in ({}, MACHINE)]

    def windows(training):
        torch.manual_seed(1)
        return [
            (window.scores().loss, window.scores().accuracy) for window, _ in training.run_epoch()
        ]

    check_equal(*made, windows)
    return made[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "rigl", "droprate": 0.2},
        {"method": "dense", "optimizer": "Momentum"},
        # The last batch is smaller.
        pytest.param(
            {"method": "granet", "hold_out": 1400, "steps_per_epoch": 5}, marks=pytest.mark.slow
        ),
        pytest.param({"method": "gmp", "optimizer": "GradientDescent"}, marks=pytest.mark.slow),
        pytest.param(
            {"method": "set", "block_size": 4, "permute_input": "block", "densities": (0.2, 1)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_mnist_steps_equal_the_host(changes):
    training = check_images(mnist.MnistTraining, mnist, hidden_sizes=(16,), **changes)
    assert (training.updates > 0) == (changes["method"] != "dense")


@pytest.mark.slow
def test_transformer_steps_equal_the_host():
    sizes = {"hidden_length": 16, "ff_length": 12, "attention_heads": 2, "qkv_length": 4}
    rates = {"optimizer": "GradientDescent", "learning_rate": 1e-3, "sparsity": 0.5}
    training = check_images(transformer.TransformerTraining, transformer, **sizes, **rates)
    assert training.updates > 0


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"embedding_size": 8, "autoregression_offset": 2}])
def test_language_model_steps_equal_the_host(tmp_path, changes):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    sizes = {"hidden_size": 16, "ff_size": 24, "heads": 2, "layers": 1, "sequence_length": 8}
    steps = {"steps": 6, "batch_size": 4, "valid_interval": 1, "update_interval": 2}
    # Adam would divide gradients that are zero but for rounding by their size.
    steps |= {"optimizer": "GradientDescent", "peak_learning_rate": 0.1}
    made = []
    for target in ({}, MACHINE):
        # The gradients' norm is above the limit, at which it is clipped.
        options = lm.Options(
            data=str(text), sparsity=0.5, grad_norm_clip=0.1, **sizes, **steps, **changes, **target
        )
        made.append(LmTraining(options, load_corpus(options, None), 3))

    def windows(training):
        return [
            (entry["loss"], entry["valid_loss"], entry["accuracy"]) for entry in training.run(6)
        ]

    check_equal(*made, windows)
    assert made[1].updates > 0


@pytest.mark.slow
def test_training_resumes_from_its_checkpoint(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    tiny = {**FEW, **MACHINE, "hidden_sizes": (16,), "epochs": 2, "seed": 7}
    expected = mnist.run(mnist.Options(**tiny, checkpoint_path=whole), QUIET)
    mnist.run(mnist.Options(**tiny, checkpoint_path=halves, stop_after=1), QUIET)
    torch.manual_seed(99)
    got = mnist.run(mnist.Options(restore=halves, checkpoint_path=halves), QUIET)
    assert_equal(state(whole / "epoch-0002.ckpt"), state(halves / "epoch-0002.ckpt"))
    assert got["target"]["programs"].keys() == expected["target"]["programs"].keys()
    assert (got["loss"], got["replaced"]) == (expected["loss"], expected["replaced"])
    tested = mnist.run(mnist.Options(restore=halves, test_mode="tests"), QUIET)
    assert tested["loss"] == expected["loss"]


@pytest.mark.slow
def test_reports_cycles_of_the_machine(tmp_path, monkeypatch, capsys):
    folder, file = tmp_path / "profiles", tmp_path / "figures.json"
    options = {"autoReport.all": "true", "autoReport.directory": str(folder)}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(options))
    assert run([*SHORT, "--target", "bow", "--tiles", "8", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    programs, operations = (figures["target"][part] for part in ("programs", "operations"))
    names = {f"{what} fc{n}" for what in ("scores", "rewire") for n in (1, 2)}
    assert programs.keys() == {"step", "rates", *names}
    for taken in programs.values():
        assert taken["seconds"] == pytest.approx(taken["cycles"] / 1.85e9)
        assert 0 < taken["max_tile_bytes"] < 638_976
    step = programs["step"]
    # Images and labels come; the loss and the logits go.
    assert step["from_host_bytes"] == 4 * (8 * 784 + 8)
    assert step["to_host_bytes"] == 4 * (1 + 8 * 10)
    assert sum(taken["cycles"] for taken in operations.values()) == step["cycles"]
    assert {"forward fc1 linear", "backward fc2 linear", "output to host"} <= operations.keys()
    fc1 = figures["layers"][0]
    # Two operations for each weight and image, and what the buckets add.
    assert operations["forward fc1 linear"]["flops"] >= 2 * 8 * fc1["weights"]
    flops = sum(taken["flops"] for taken in operations.values())
    assert step["tflops"] == pytest.approx(flops / step["seconds"] / 1e12)
    # Their scores in float32, and the values, go to the host.
    assert programs["scores fc1"]["to_host_bytes"] >= 4 * 784 * 16
    shown = capsys.readouterr().out
    assert "Last run of each program" in shown
    assert f"{step['cycles']:,.0f}" in shown
    stored = sorted(folder.rglob("profile.json"))
    assert run(["report", str(stored[0]), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size


def test_out_of_tile_memory_prints_one_line(capsys):
    assert run(["mnist", "--hold-out", "1300", "--target", "mk2", "--tiles", "1"]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("dynsparse: tile 0 needs")
    assert "\n" not in message


LM = ["lm", "--target", "bow"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([*SHORT, "--target", "gc200"], "--target: expected one of bow, mk2, got 'gc200'"),
        ([*SHORT, "--tiles", "8"], "--tiles: applies to runs with --target, got none"),
        *(
            ([*SHORT, "--target", "bow", "--method", method], "--target: applies to --method rigl,")
            for method in ("snfs", "mest", "deepr", "topkast")
        ),
        (
            [*SHORT, "--target", "bow", "--data-type", "float16"],
            "--target: applies to --data-type float32, got --data-type float16",
        ),
        ([*LM, "--gradient-accumulation-count", "2"], "applies to one micro-batch per step, got"),
        ([*LM, "--repetition-weighting"], "applies to runs without --repetition-weighting"),
        ([*LM, "--sparse-embeddings"], "applies to runs without --sparse-embeddings"),
        (["cifar", "--target", "bow"], "no such option: --target"),
    ],
    ids=lambda part: " ".join(part[-2:]) if isinstance(part, list) else "",
)
def test_unsupported_options_print_one_line(line, words, capsys):
    assert run(line) == 2
    message = capsys.readouterr().err
    assert words.lower() in message.lower()
    assert message.count("\n") == 1
