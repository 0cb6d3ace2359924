"""A wrong value of any flag of any command exits with status 2 and one line on stderr.

Nothing may start: functions that train, measure or simulate are replaced by one that fails.
"""

from __future__ import annotations

import warnings
from typing import get_args

import pytest

pytest.importorskip("typer")

import typer

import dynsparse.apps.lm as lm_app
from dynsparse.apps.image_classification import Training as ImageTraining
from dynsparse.apps.image_classification import cifar as cifar_app
from dynsparse.apps.image_classification import mnist as mnist_app
from dynsparse.apps.image_classification import transformer as transformer_app
from dynsparse.apps.lm.training import Training as LanguageModel
from dynsparse.cli.app import app, run
from dynsparse.options import FILE, options_of
from dynsparse.options import flag as flag_of
from dynsparse.pattern import SparsePattern
from dynsparse.training.records import Recorder

GROUP = typer.main.get_command(app)
COMMANDS = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}

NO_NUMBERS = ("abc", "", "1,5", "1.5.2", "0x1p3", "one", "--", "1 2")
HUGE = "99999999999999999999999"
OUT_OF_RANGE = ("-1", "nan", "inf", "1e400", HUGE)
FLOATS = (float, list[float])
NO_CHOICES = ("", "no such thing", "\x00")

TRAININGS = {
    "mnist": (mnist_app, ImageTraining),
    "mnist-transformer": (transformer_app, ImageTraining),
    "cifar": (cifar_app, ImageTraining),
    "lm": (lm_app, LanguageModel),
}

BASE = {
    "matmul": ["--rows", "64", "--cols", "64", "--batch", "8", "--density", "0.1", "--plan-only"],
    "visualise": ["--records-path", "there is none"],
    "encode": ["--output", "there/is/none"],
    "report": ["there is none"],
    "cifar": ["--dataset", "digits"],  # nothing is downloaded
}


def flags():
    """Return (command, flag, type of its value) of every flag with a value."""
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if parameter.opts[0].startswith("--") and not parameter.is_flag:
                yield name, parameter.opts[0], parameter.type_descriptor.annotation


def _is_number(kind):
    return kind in (int, float) or any(one in (int, float) for one in get_args(kind))


CASES = [
    (name, flag, value)
    for name, flag, kind in flags()
    if _is_number(kind)
    for value in NO_NUMBERS + OUT_OF_RANGE
    # As a number it is one like any other, where there is no largest one.
    if not (name in TRAININGS and value == HUGE and kind in FLOATS)
]


class Started(Exception):
    pass


@pytest.fixture(autouse=True)
def _commands_made_once(monkeypatch):
    """Cache the commands, which typer creates again for every call; that takes most of the time."""
    monkeypatch.setattr(typer.main, "get_command", lambda app: GROUP)


@pytest.fixture
def nothing_starts(monkeypatch):
    def started(options, *args, **named):
        options.check()  # what every training begins with
        raise Started

    for module, _ in TRAININGS.values():
        monkeypatch.setattr(module, "run", started)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.fixture
def nothing_trains(monkeypatch):
    def started(*args, **named):
        raise Started

    monkeypatch.setattr(ImageTraining, "run_epoch", started)
    monkeypatch.setattr(LanguageModel, "run", started)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


def check_refused(capsys, arguments):
    status = run(arguments)
    told = capsys.readouterr().err
    assert status == 2, (arguments, told)
    assert told.startswith("dynsparse: "), (arguments, told)
    assert told.count("\n") == 1, (arguments, told)
    assert len(told) < 1000, (arguments, told)


@pytest.mark.parametrize(("name", "flag"), sorted({case[:2] for case in CASES}))
def test_wrong_value_prints_one_line(name, flag, nothing_starts, capsys):
    for command, option, value in CASES:
        if (command, option) != (name, flag):
            continue
        check_refused(capsys, [name, *BASE.get(name, []), f"{flag}={value}"])


@pytest.mark.parametrize("name", COMMANDS)
def test_unknown_flag_prints_one_line(name, nothing_starts, capsys):
    assert run([name, "--no-such-flag", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# Names, and texts that must have a form, of all commands.
CHOICES = [
    ("matmul", "--dtype"),
    ("matmul", "--method"),
    ("matmul", "--passes"),
    ("matmul", "--target"),
    ("matmul", "--partials-type"),
    ("encode", "--tokens"),
    ("lm", "--preset"),
    ("bench", "--benchmark"),
    *(
        (name, f"--{flag_of(option)}")
        for name, (module, _) in TRAININGS.items()
        for option, known in options_of(module.Options).items()
        if known.kind.choices and known.kind.type is str
    ),
]
FORMS = [
    ("matmul", "--options"),
    ("matmul", "--plan-constraints"),
    *(
        (name, f"--{flag_of(option)}")
        for name, (module, _) in TRAININGS.items()
        for option, known in options_of(module.Options).items()
        if known.kind.type is dict
    ),
]
NO_FORMS = (
    "", "x", "{", "[1]", "=", "=1", "a=", "a={", '{"a": NaN}', '{"a": {"b": "c"}}', "[" * 5000,
    '{"partition": {"x": "y"}}', "9" * 5000, '{"a":' * 200 + "1" + "}" * 200,
)  # fmt: skip


@pytest.mark.parametrize(("name", "flag"), CHOICES)
def test_unknown_name_prints_one_line(name, flag, nothing_starts, capsys):
    for value in NO_CHOICES:
        check_refused(capsys, [name, *BASE.get(name, []), f"{flag}={value}"])


@pytest.mark.parametrize(("name", "flag"), FORMS)
def test_invalid_json_prints_one_line(name, flag, nothing_starts, capsys):
    for value in NO_FORMS:
        # What the optimizer makes of an argument it does not know is found when it is made.
        if not (flag == "--optimizer-arg" and value in ("9" * 5000,)):
            check_refused(capsys, [name, *BASE.get(name, []), f"{flag}={value}"])


# Every place to read from or to write to, with what it needs beside it.
PLACES = [
    ("matmul", "--report"),
    ("matmul", "--profile"),
    ("report", "--output"),
    ("report", "--compare"),
    ("visualise", "--records-path"),
    ("encode", "--output"),
    ("encode", "--data"),
    ("encode", "--vocabulary"),
    ("bench", "--spec"),
    ("bench", "--from"),
    ("bench", "--json"),
    ("bench", "--plot"),
    ("bench", "--markdown"),
    ("lm", "--data"),
    *(
        (name, f"--{flag_of(option)}")
        for name, (module, _) in TRAININGS.items()
        for option, known in options_of(module.Options).items()
        if known.kind is FILE
    ),
]
BESIDE = {
    "--data-dir": ["--dataset", "mnist"],
    "--bpe-dir": ["--tokens", "bpe"],
    "--vocabulary": ["--output", "tokens"],
}


@pytest.mark.parametrize(("name", "flag"), PLACES)
def test_unusable_path_prints_one_line(name, flag, nothing_trains, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("the cat sat on the mat.\n" * 100)
    small = ["--data", "text", "--sequence-length", "8"] if name == "lm" else []
    base = [*BASE.get(name, []), *small, *BESIDE.get(flag, [])]
    if flag in base:
        base = []
    if (name, flag) == ("cifar", "--data-dir"):
        base = []
    for value in ("text/below a file", "a\x00b", "x" * 5000):
        check_refused(capsys, [name, *base, f"{flag}={value}"])
    assert [file.name for file in tmp_path.iterdir()] == ["text"]


def test_unknown_colour_map_prints_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    recorder = Recorder(tmp_path)
    recorder.start({"w": SparsePattern.full((2, 2))})
    for value in NO_CHOICES:
        check_refused(capsys, ["visualise", "--records-path", str(tmp_path), f"--cmap={value}"])


def test_number_of_cases():
    assert len(set(CASES)) >= 300
