"""The pages match the `dynsparse` command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from dynsparse.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CLI = (DOCS / "cli.md").read_text()
GROUP = typer.main.get_command(app)
COMMANDS = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}


def flags_of(command):
    return {"--help"} | {
        flag for one in command.params for flag in (*one.opts, *one.secondary_opts)
    }


def test_every_command_has_a_row():
    rows = re.findall(r"^\| `dynsparse ([a-z-]+)", CLI, re.M)
    assert sorted(rows) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_on_the_pages_exist(name):
    """In calls in code blocks and in the text."""
    known = flags_of(COMMANDS[name])
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md"):
        text = page.read_text().replace("\\\n", " ")
        for call in re.findall(rf"dynsparse {name}(?![\w-])([^\n`]*)", text):
            said = set(re.findall(r"(?<!\S)--[a-z0-9-]+", call))
            assert said <= known, f"{page.relative_to(ROOT)}: dynsparse {name}{call}"


def test_every_environment_variable_has_a_row():
    read = {"DYNSPARSE_NATIVE"}  # where the package is built
    for file in (ROOT / "src").rglob("*.py"):
        read.update(re.findall(r"[\"'](DYNSPARSE_\w+)[\"']", file.read_text()))
    for file in (ROOT / "csrc").rglob("*.cpp"):
        read.update(re.findall(r"getenv\(\"(\w+)\"", file.read_text()))
    assert set(re.findall(r"^\| `(DYNSPARSE_\w+)", CLI, re.M)) == read
