"""Declarations of options: their checks, and which of them a checkpoint stores."""

import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dynsparse.apps import lm
from dynsparse.apps.common.options import METHODS
from dynsparse.apps.common.resume import Checkpoint, fill_in
from dynsparse.apps.image_classification import mnist, transformer
from dynsparse.cli.app import _COMMANDS
from dynsparse.cli.app import run as command
from dynsparse.options import flag, option, options_of, override, pairs
from dynsparse.training.algorithms import BY_NAME
from dynsparse.training.checkpoint import save_checkpoint

QUIET = Console(quiet=True)
APPS = {"mnist": mnist, "mnist-transformer": transformer, "lm": lm}
# What neither the network nor the course of the training depends on.
OF_THE_RUN = {
    "device", "threads", "restore", "checkpoint_path", "checkpoint_freq", "stop_after", "overwrite",
    "records_path", "json", "trace", "tensorboard", "use_wandb", "wandb_project_name", "wandb_name",
    "wandb_tags",
}  # fmt: skip
OWN = {
    "mnist": {"data_dir", "test_mode", "log"},
    "mnist-transformer": {"data_dir", "test_mode", "log"},
    "lm": {
        "valid_data", "test_data", "bpe_dir", "mode", "sample", "prompt", "temperature", "top_k",
    },
}  # fmt: skip


@pytest.mark.parametrize("app", APPS)
def test_options_are_declared_completely(app):
    options = APPS[app].Options
    for name, known in options_of(options).items():
        assert known.help.endswith("."), name
        assert known.panel in options.panels, name
        assert set(known.methods) <= set(METHODS), name
    options().check()


@pytest.mark.parametrize("app", APPS)
def test_options_belong_to_the_training_or_the_run(app):
    options = options_of(APPS[app].Options)
    run = {name for name, known in options.items() if known.defines == "run"}
    assert run == OF_THE_RUN | OWN[app]
    apart = {name for name, known in options.items() if known.defines == "apart"}
    assert apart == {"seed"} | ({"data"} if app == "lm" else set())


@pytest.mark.parametrize("app", APPS)
def test_values_of_another_type_raise(app):
    options = APPS[app].Options
    for field in dataclasses.fields(options):
        for wrong in (object(), {1, 2}, [object()], (3.5, None)):
            with pytest.raises(ValueError, match=f"^--{flag(field.name)}: expected ") as error:
                options(**{field.name: wrong}).check()
            assert "\n" not in str(error.value)


def test_methods_match_the_trainers_arguments():
    options = options_of(mnist.Options)
    assert options["pooling_type"].methods == ("rigl", "snfs", "granet")
    assert set(options["cosine_prune_schedule"].methods) == {
        "rigl", "set", "snfs", "mest", "topkast",
    }  # fmt: skip
    assert set(options["update_interval"].methods) == set(BY_NAME) - {"static"}
    assert options["epochs"].methods == ()


def test_overridden_option_keeps_the_original():
    @dataclasses.dataclass
    class First:
        a: int = option(1, "One.", mnist_kind("epochs"), "Data")
        b: dict = option({}, "Two.", pairs("x=1"), "Data")

    @dataclasses.dataclass
    class Second(First):
        a: int | None = override(First, "a", default=None, help="Other.")
        b: dict = override(First, "b", default={"x": 2})

    assert (options_of(First)["a"].help, options_of(Second)["a"].help) == ("One.", "Other.")
    assert (First().a, First().b) == (1, {})
    assert (Second().a, Second().b) == (None, {"x": 2})
    assert Second().b is not Second().b
    assert options_of(Second)["a"].optional


def mnist_kind(name):
    return options_of(mnist.Options)[name].kind


def forge(path: Path, of: str, **entries) -> Path:
    """Write an untrusted checkpoint with the given options."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    defaults = APPS[of].Options()
    extra = {"app": of, "options": defaults.definition(), "seed": 1, "data": "stdlib"}
    extra["options"] |= entries.pop("options", {})
    save_checkpoint(path, model=model, optimizer=optimizer, extra=extra | entries)
    return path


@pytest.mark.parametrize("app", APPS)
def test_checkpoint_cannot_set_options_of_the_run(app, tmp_path):
    """Options of output, logging and threads keep their values."""
    evil = {name: str(tmp_path / f"evil-{name}") for name in OF_THE_RUN | OWN[app]}
    file = forge(tmp_path / "a.ckpt", app, options={**evil, "batch_size": 3, "unheard_of": 1})
    own = APPS[app].Options(restore=file)
    adopted = fill_in(own, Checkpoint.read(app, file))
    assert adopted.batch_size == 3
    for name in evil:
        assert getattr(adopted, name) == getattr(own, name), name


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"options": {"batch_size": "many"}}, "--batch-size: expected an integer"),
        ({"options": {"method": ["rigl"]}}, "--method: expected one of"),
        ({"options": {"optimizer_arg": 3}}, "--optimizer-arg: expected name=json"),
        ({"options": {"cosine_prune_schedule": 5}}, "--cosine-prune-schedule: expected a JSON"),
        ({"options": {"data_type": None}}, "--data-type: expected one of"),
        ({"seed": "one"}, "expected the options and the seed of a training"),
        ({"app": "other"}, "expected a checkpoint of `dynsparse"),
    ],
    ids=str,
)
def test_forged_options_print_one_line(entries, message, tmp_path):
    file = forge(tmp_path / "a.ckpt", "mnist", **entries)
    with pytest.raises(ValueError, match="expected") as error:
        mnist.run(mnist.Options(restore=file), QUIET)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["lm", "mnist-transformer"])
def test_density_is_one_minus_sparsity(name, capsys, monkeypatch):
    module = {"lm": "lm", "mnist-transformer": "image_classification.transformer"}[name]
    seen = []
    run = f"dynsparse.apps.{module}.run"
    monkeypatch.setattr(run, lambda options, given: seen.append((options.sparsity, given)))
    for density, sparsity in ((0.1, 0.9), (0.9, 0.1), (0.05, 0.95), (1, 0), (0.3, 0.7)):
        assert command([name, "--density", str(density)]) == 0
        assert seen.pop() == (sparsity, {"sparsity"})
    for wrong in ("0", "1.5", "nan", "-1"):
        assert command([name, "--density", wrong]) == 2
        assert "--density: expected a number in (0, 1], got" in capsys.readouterr().err
    assert command([name, "--density", "0.1", "--sparsity", "0.9"]) == 2
    assert "expected --density or --sparsity, got both" in capsys.readouterr().err
    assert not seen


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("mnist --density 0.2 1", "densities", (0.2, 1.0)),
        ("mnist --densities 0.2 1", "densities", (0.2, 1.0)),
        ("mnist --hidden-size 20", "hidden_sizes", (20,)),
        ("lm --densities 0.2", "sparsity", 0.8),
        ("cifar --densities 0.2", "sparsity", 0.8),
        ("lm --dataset a.txt", "data", "a.txt"),
        *((f"{app} --checkpoint c", "checkpoint_path", Path("c")) for app in ("mnist", "lm")),
        ("cifar --checkpoint-path c", "checkpoint_path", Path("c")),
    ],
)
def test_flag_has_the_same_meaning_in_all_commands(line, name, value, monkeypatch):
    seen = []
    for module in ("lm", "image_classification.mnist", "image_classification.cifar"):
        monkeypatch.setattr(
            f"dynsparse.apps.{module}.run", lambda o, given: seen.append((o, given))
        )
    assert command(line.split()) == 0
    ((options, given),) = seen
    assert getattr(options, name) == value
    assert given == {name}


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("mnist --sparsity 0.9", "--density"),
        ("mnist --checkpoints c", "--checkpoint-path"),
        ("bench --benchmarks quick", "--benchmark"),
    ],
)
def test_unknown_spelling_suggests_the_flag(line, instead, capsys):
    assert command(line.split()) == 2
    told = capsys.readouterr().err
    assert f"No such option: {line.split()[1]}" in told
    assert instead in told.partition("Possible options")[2]


@pytest.mark.parametrize("name", ["", *_COMMANDS, "matmul", "report"])
def test_short_help(name, capsys):
    assert command([*filter(None, [name]), "-h"]) == 0
    short = capsys.readouterr().out
    assert command([*filter(None, [name]), "--help"]) == 0
    assert short == capsys.readouterr().out
    assert "Usage: dynsparse" in short


@pytest.mark.parametrize(
    ("steps", "warm_up", "interval"), [(50, 5, 3), (1, 0, 1), (4000, 100, 200)]
)
def test_short_trainings_of_the_language_model(steps, warm_up, interval):
    options = lm.Options(steps=steps)
    options.check()
    assert (options.warm_up, options.interval) == (warm_up, interval)
    given = lm.Options(steps=steps, warmup_steps=0, update_interval=7)
    assert (given.warm_up, given.interval) == (0, 7)


def test_training_length_on_images():
    lengths = [transformer.Options(**o).length for o in ({}, {"dataset": "mnist"}, {"epochs": 3})]
    assert lengths == [12, 1, 3]
    assert mnist.Options().length == 10
