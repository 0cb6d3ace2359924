"""The page for PopSparse users is generated from the tables, and its names exist."""

import importlib
import re
from dataclasses import fields
from functools import reduce
from pathlib import Path

import pytest
import typer
from original_tables import FUNCTIONS, OPTIONS, TOOLS, fill, render

from dynsparse.cli.app import app
from dynsparse.cli.original import PROGRAMS
from popsparse.machine import Target
from popsparse.planning.options import Options, to_option_name

PAGE = Path(__file__).parents[2] / "docs/coming-from-popsparse.md"


def test_page_is_up_to_date():
    """To update: python docs/tools/original_tables.py docs/coming-from-popsparse.md"""
    text = PAGE.read_text()
    assert fill(text) == text
    for name in (*PROGRAMS, "options", "functions", "tools"):
        assert f"<!-- original: {name} -->" in text


@pytest.mark.parametrize("name", FUNCTIONS.values())
def test_name_on_the_page_exists(name):
    package, *rest = name.split(".")
    found = importlib.import_module(package)
    if name.startswith("popsparse.static."):
        found, rest = importlib.import_module("popsparse.static"), rest[1:]
    reduce(getattr, rest, found)


def test_commands_and_attributes_exist():
    group = typer.main.get_command(app)
    commands = group.list_commands(typer.Context(group))
    for code in re.findall(r"`(.*?)`", " ".join(TOOLS.values())):
        if code.startswith("dynsparse "):
            assert code.split()[1] in commands
        elif "." in code:
            reduce(getattr, code.split(".")[1:], importlib.import_module(code.split(".")[0]))
        elif code != "top":
            assert hasattr(Target(), code)


def test_options_on_the_page_exist():
    ours = {to_option_name(name) for name in OPTIONS}
    # Planning with the price of propagation is new here.
    assert ours == {field.name for field in fields(Options)} - {"price_propagation"}


def test_unknown_table_raises():
    with pytest.raises(ValueError, match="expected options, functions, tools or one of"):
        render("sparse_minst.py")
