"""A wrong value of any flag of any command ends with status 2 and one line on stderr.

Nothing may start: what would train, measure or simulate is replaced by an alarm.
"""

from __future__ import annotations

import warnings
from typing import get_args

import pytest

pytest.importorskip("typer")

import typer

import dynsparse.apps.lm as lm_app
from dynsparse.apps.pictures import mnist as mnist_app
from dynsparse.apps.pictures import transformer as transformer_app
from dynsparse.cli.app import app, run

COMMANDS = typer.main.get_command(app).commands

NO_NUMBERS = ("abc", "", "1,5", "1.5.2", "0x1p3", "one", "--", "1 2")
OUT_OF_RANGE = ("-1", "nan", "inf", "1e400", "99999999999999999999999")
NO_CHOICES = ("", "no such thing", "\x00")

# The ranges of a training's flags are checked where it starts: tests/apps looks at those.
TRAININGS = {"mnist", "mnist-transformer", "lm"}

# Any number is right here; or a simulation of that size begins.
ANY = {"--seed", "--seeds", "--tiles"}

BASE = {
    "matmul": ["--rows", "64", "--cols", "64", "--batch", "8", "--density", "0.1", "--plan-only"],
    "visualise": ["--records-path", "there is none"],
    "encode": ["--output", "there/is/none"],
}


def flags():
    """(command, flag, kind of its values) of every flag that takes one."""
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if not parameter.is_flag and parameter.opts[0].startswith("--"):
                yield name, parameter.opts[0], parameter.type_descriptor.annotation


def _is_number(kind):
    return kind in (int, float) or any(one in (int, float) for one in get_args(kind))


CASES = [
    (name, flag, value)
    for name, flag, kind in flags()
    if _is_number(kind)
    for value in (NO_NUMBERS if flag in ANY or name in TRAININGS else NO_NUMBERS + OUT_OF_RANGE)
]


class Started(Exception):
    pass


@pytest.fixture
def nothing_starts(monkeypatch):
    def started(*args, **named):
        raise Started

    for module in (mnist_app, transformer_app, lm_app):
        monkeypatch.setattr(module, "run", started)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.mark.parametrize(("name", "flag"), sorted({case[:2] for case in CASES}))
def test_a_wrong_value_gets_one_line(name, flag, nothing_starts, capsys):
    for command, option, value in CASES:
        if (command, option) != (name, flag):
            continue
        status = run([name, *BASE.get(name, []), f"{flag}={value}"])
        told = capsys.readouterr().err
        assert status == 2, (value, told)
        assert told.startswith("dynsparse: "), (value, told)
        assert told.count("\n") == 1, (value, told)
        assert len(told) < 1000, (value, told)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_that_is_not_there_gets_one_line(name, nothing_starts, capsys):
    assert run([name, "--no-such-flag", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_there_are_many_cases():
    assert len(set(CASES)) >= 300
