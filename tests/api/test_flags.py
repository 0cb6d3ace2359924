"""A wrong value of any flag of any command ends with status 2 and one line on stderr.

Nothing may start: what would train, measure or simulate is replaced by an alarm.
"""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("typer")

import typer

import dynsparse.apps.lm as lm_app
from dynsparse.apps.pictures import mnist as mnist_app
from dynsparse.apps.pictures import transformer as transformer_app
from dynsparse.cli.app import app

COMMANDS = typer.main.get_command(app).commands

WRONG_NUMBERS = ("abc", "", "-1", "nan", "1e400", "99999999999999999999999")
WRONG_TEXTS = ("", "no such thing")

# Flags whose every number is right somewhere: what is no number stays wrong.
ANY_NUMBER = ("abc", "", "nan")


def flags():
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if parameter.opts and parameter.opts[0].startswith("--") and parameter.name != "help":
                yield name, parameter


def wrong_values(parameter):
    kind = parameter.type.name
    if parameter.is_flag:
        return []
    if kind in ("integer", "float", "integer range", "float range"):
        return WRONG_NUMBERS
    return WRONG_TEXTS


CASES = [
    (name, parameter.opts[0], value)
    for name, parameter in flags()
    for value in wrong_values(parameter)
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
