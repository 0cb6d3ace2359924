"""TensorBoard and Weights & Biases get the figures, and their absence is told in one line."""

import sys
import types

import pytest
from rich.console import Console

from dynsparse.apps.lm import Options, run

QUIET = Console(quiet=True)
TINY = {
    "layers": 1, "hidden_size": 8, "ff_size": 8, "heads": 2, "sequence_length": 8, "seed": 7,
    "batch_size": 4, "steps": 4, "warmup_steps": 1, "valid_interval": 2, "update_interval": 2,
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat.\n" * 40)
    return tmp_path / "text.txt"


def test_tensorboard_gets_curves_and_the_test(text, tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder):
            calls.append(("open", folder))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def add_text(self, name, value):
            calls.append((name, value))

        def close(self):
            calls.append(("close",))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    figures = run(Options(**TINY, data=text, tensorboard=tmp_path / "tb"), QUIET)
    assert calls[0] == ("open", str(tmp_path / "tb"))
    assert ("valid_loss", figures["history"][0]["valid_loss"], 2) in calls
    assert ("loss", figures["history"][1]["loss"], 4) in calls
    assert ("test_loss", figures["loss"], 4) in calls
    assert calls[-1] == ("close",)


def test_wandb_gets_curves_options_and_the_test(text, monkeypatch):
    logged = []
    fake = types.SimpleNamespace(
        log=lambda figures, step: logged.append((step, figures)),
        summary={},
        finish=lambda: logged.append("finished"),
    )
    module = types.ModuleType("wandb")
    module.init = lambda **settings: logged.append(settings) or fake
    monkeypatch.setitem(sys.modules, "wandb", module)
    options = Options(**TINY, data=text, use_wandb=True, wandb_tags=("a",))
    figures = run(options, QUIET)
    assert logged[0]["project"] == "dynsparse-language-model"
    assert logged[0]["tags"] == ["a"]
    assert logged[0]["config"]["data"] == str(text)
    assert [entry[0] for entry in logged[1:3]] == [2, 4]
    assert logged[1][1]["valid_loss"] == figures["history"][0]["valid_loss"]
    assert fake.summary["test_perplexity"] == figures["perplexity"]
    assert logged[-1] == "finished"


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        ("torch.utils.tensorboard", {"tensorboard": "tb"}),
        ("wandb", {"use_wandb": True}),
    ],
)
def test_a_logger_that_is_not_installed(text, monkeypatch, module, changes):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match="which is not installed: pip install") as error:
        run(Options(**TINY, data=text, **changes), QUIET)
    assert "\n" not in str(error.value)
