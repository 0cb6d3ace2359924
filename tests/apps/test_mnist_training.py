"""Small complete trainings: results and written files."""

import json
import os
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dynsparse.apps.image_classification.mnist import Options, run
from dynsparse.training.records import Records

QUIET = Console(quiet=True)
TINY = {
    "epochs": 2,
    "batch_size": 128,
    "hidden_sizes": (32,),
    "steps_per_epoch": 3,
    "seed": 7,
    "learning_rate": 0.01,
}


def tiny(**changes):
    return run(Options(**{**TINY, **changes}), QUIET)


def test_json_equals_the_returned_figures(tmp_path):
    figures = tiny(json=tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert {"accuracy", "loss", "density", "epochs", "seconds", "updates"} <= figures.keys()
    assert 0 <= figures["accuracy"] <= 1
    assert figures["epochs"] == 2
    assert figures["steps"] == 24
    assert figures["updates"] == 5  # every fourth of 24 steps, but not after the last
    assert figures["density"] == pytest.approx((2509 + 96) / (784 * 32 + 320))
    assert 0 < figures["update_share"] < 1
    assert figures["replaced"] > 0
    assert [layer["weights"] for layer in figures["layers"]] == [2509, 96]
    alone = tiny(test_mode="training")
    assert alone["accuracy"] is alone["loss"] is None
    assert alone["train_accuracy"] == figures["train_accuracy"]


def test_equal_seeds_give_equal_results():
    first, second = tiny(), tiny()
    for key in ("accuracy", "loss", "train_loss", "replaced"):
        assert first[key] == second[key]
    assert tiny(seed=8)["loss"] != first["loss"]


def test_default_seed_is_drawn_and_reported():
    figures = tiny(seed=None, epochs=1)
    assert tiny(seed=figures["seed"], epochs=1)["loss"] == figures["loss"]


@pytest.mark.parametrize("method", ["rigl", "set", "static", "dense"])
def test_every_method_learns(method):
    figures = tiny(method=method, epochs=5, batch_size=16)
    assert figures["accuracy"] > 0.6
    assert (figures["updates"] > 0) == (method in ("rigl", "set"))
    assert (figures["density"] == 1.0) == (method == "dense")


NO_UPDATES = pytest.mark.filterwarnings("ignore:the pattern never changes:UserWarning")


@pytest.mark.parametrize("optimizer", ["GradientDescent", "Momentum", "Adam"])
def test_every_optimizer_learns(optimizer):
    rate = {"GradientDescent": 0.3, "Momentum": 0.04, "Adam": 0.004}[optimizer]
    assert tiny(optimizer=optimizer, learning_rate=rate, epochs=5, batch_size=32)["accuracy"] > 0.6


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 4, "pooling_type": "SUM"},
        {"block_size": 8, "pooling_type": "AVG", "permute_input": "random"},
        {"block_size": 16, "pooling_type": "MAX", "permute_input": "block", "densities": (0.1, 1)},
        {"block_size": 32, "pooling_type": "NONE", "permute_input": "block", "densities": (0.5, 1)},
        {"block_size": 128, "hidden_sizes": (128,), "densities": (0.5, 1)},
        {"data_type": "bfloat16"},
        {"data_type": "float16", "method": "mest"},
        {"hidden_sizes": (48, 24), "densities": (0.05, 0.2, 1)},
        {"method": "granet", "block_size": 16, "pooling_type": "SUM", "densities": (0.1, 1)},
        {"method": "snfs", "block_size": 16, "pooling_type": "AVG", "densities": (0.1, 1)},
        {"cosine_prune_schedule": {"zero_steps": 2, "phase_delay": 0.1, "period": 1.0}},
        {"hold_out": 200, "update_interval": 5, "data_type": "float64"},
        pytest.param({"prune_ratio": 0.0}, marks=NO_UPDATES),
        {"densities": (0.9, 0.9)},
    ],
    ids=str,
)
def test_variants_run(changes):
    figures = tiny(**changes)
    assert figures["accuracy"] > 0.2
    assert figures["loss"] < 10


def test_too_large_loss_scale():
    with pytest.raises(
        ValueError, match=r"gradients overflow float16 in all .* lower --loss-scale"
    ):
        tiny(data_type="float16", loss_scale=1e9)


def test_zero_steps_count_updates():
    waiting = tiny(cosine_prune_schedule={"zero_steps": 3})
    assert waiting["updates"] == 3  # the third, fourth and fifth


def test_number_of_replaced_blocks_is_rounded_down():
    few = {"block_size": 64, "hidden_sizes": (64,), "densities": (0.125, 1)}
    up = tiny(**few)
    assert up["updates"] > 1
    assert up["replaced"] == up["updates"] * 64**2
    assert tiny(**few, prune_rounding="down")["replaced"] == 0


def test_number_of_threads_is_restored():
    before = torch.get_num_threads()
    tiny(threads=before + 1, epochs=1)
    assert torch.get_num_threads() == before


def test_record_follows_the_patterns(tmp_path):
    figures = tiny(records_path=tmp_path / "rec", permute_input="random")
    records = Records.load(tmp_path / "rec")
    assert list(records.layers) == ["fc1", "fc2"]
    assert records.steps == [0, 4, 8, 12, 16, 20]
    grown = sum(len(g) for name in records.layers for _, g in records.changes(name))
    assert grown == figures["replaced"]
    assert sorted(records.metadata["pixel_permutation"]) == list(range(784))
    assert records.metadata["method"] == "rigl"
    assert [t["step"] for t in records.telemetry] == [4, 8, 12, 16, 20, 24]


def test_record_of_the_second_layer_has_no_pixels(tmp_path):
    tiny(records_path=tmp_path / "rec", densities=(1.0, 0.3), epochs=1)
    records = Records.load(tmp_path / "rec")
    assert list(records.layers) == ["fc2"]
    assert "pixel_permutation" not in records.metadata


def test_log_has_the_format_of_the_original(tmp_path):
    tiny(log=tmp_path / "deep" / "log.txt")
    lines = (tmp_path / "deep" / "log.txt").read_text().splitlines()
    assert lines[0] == "Iteration Density_0.1_0.3"
    assert [int(line.split()[0]) for line in lines[1:]] == [4, 8, 12, 16, 20, 24]
    assert all(0 <= float(line.split()[1]) <= 1 for line in lines[1:])


def test_plain_lines_without_a_terminal(tmp_path):
    with (tmp_path / "live.txt").open("w") as file:
        run(Options(**TINY), Console(file=file, width=100, force_terminal=True))
    assert "━" in (tmp_path / "live.txt").read_text()
    with (tmp_path / "out.txt").open("w") as file:
        run(Options(**TINY), Console(file=file, width=100))
    text = (tmp_path / "out.txt").read_text()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "rigl on digits: 1,437 images to train, 360 to test"
    assert lines[2].split() == ["epoch", "loss", "accuracy", "density", "replaced", "ms/step"]
    assert [line.split()[0] for line in lines[3:5]] == ["1/2", "2/2"]
    for words in ("test accuracy", "parameters", "memory: optimizer", "time in pattern updates"):
        assert words in text


WRONG = [
    ({"steps_per_epoch": 99}, "--steps-per-epoch: expected at most the 12 batches of an epoch"),
    ({"hold_out": 1437}, "expected to hold out between 1 and 1436"),
    ({"cosine_prune_schedule": {"zero_steps": 50}}, "--cosine-prune-schedule: zero_steps must be"),
    ({"dataset": "mnist", "data_dir": "nowhere"}, "expected a folder with the mnist files"),
    ({"json": "no/such/folder/a.json"}, "--json: expected a file in a folder that can be written"),
    ({"learning_rate": 1e30}, "diverged"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_unsupported_options_raise(changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = ("json", "data_dir")
    changes = {k: Path(v) if k in paths else v for k, v in changes.items()}
    with pytest.raises((ValueError, OSError), match=r"expected|must|diverged") as error:
        tiny(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_loggers_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="expected the package wandb"):
        tiny(use_wandb=True)
    with pytest.raises(ModuleNotFoundError, match="expected the package tensorboard"):
        tiny(tensorboard=tmp_path)


def test_wandb_logging(monkeypatch):
    calls = []
    handle = types.SimpleNamespace(
        log=lambda figures, step: calls.append((step, figures)),
        summary={},
        finish=lambda: calls.append("finish"),
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: calls.append(settings) or handle
    monkeypatch.setitem(sys.modules, "wandb", fake)
    figures = tiny(use_wandb=True, wandb_project_name="p", wandb_tags=("a", "b"))
    assert calls[0]["project"] == "p"
    assert calls[0]["tags"] == ["a", "b"]
    assert calls[0]["config"]["batch_size"] == 128
    assert [c[0] for c in calls[1:-1]] == [4, 8, 12, 16, 20, 24]
    assert {"loss", "accuracy", "replaced"} <= calls[1][1].keys()
    assert calls[-1] == "finish"
    assert handle.summary["test_accuracy"] == figures["accuracy"]


def test_tensorboard_logging(monkeypatch, tmp_path):
    scalars = []

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, name, value, step):
            scalars.append((name, value, step))

        def add_text(self, name, text):
            assert '"accuracy"' in text

        def close(self):
            scalars.append("closed")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    figures = tiny(tensorboard=tmp_path)
    assert ("test/accuracy", figures["accuracy"], 24) in scalars
    assert len([s for s in scalars if s[0] == "train/loss"]) == 6
    assert scalars[-1] == "closed"


@pytest.mark.slow
@pytest.mark.skipif("DYNSPARSE_DATA_DIR" not in os.environ, reason="DYNSPARSE_DATA_DIR is not set")
def test_one_epoch_of_the_real_mnist():
    options = Options(dataset="mnist", data_dir=Path(os.environ["DYNSPARSE_DATA_DIR"]), epochs=1)
    figures = run(options, QUIET)
    assert figures["accuracy"] > 0.94
    assert figures["steps"] == 3750
    assert figures["updates"] == 4  # every 750 steps, but not after the last


def test_the_example_learns(capsys):
    path = Path(__file__).parents[2] / "examples" / "mnist_rigl.py"
    assert len(path.read_text().splitlines()) < 60
    before = torch.get_num_threads()
    assert runpy.run_path(str(path))["main"]() > 0.93
    torch.set_num_threads(before)
    assert "test accuracy" in capsys.readouterr().out
