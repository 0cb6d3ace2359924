"""The option tables in the docs, generated from the definitions of the options.

    python docs/tools/option_tables.py docs/*.md

replaces the text between `<!-- options: COMMAND -->` and `<!-- /options -->` by all options of a
command; with `<!-- options: COMMAND beside OTHER -->` by those that differ from the other command;
with `<!-- options: COMMAND restored -->` by those that a checkpoint restores.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from dynsparse.apps import lm
from dynsparse.apps.image_classification import cifar, mnist, transformer
from dynsparse.options import flag, list_options, methods_of, options_of

COMMANDS: dict[str, type] = {
    "mnist": mnist.Options,
    "mnist-transformer": transformer.Options,
    "cifar": cifar.Options,
    "lm": lm.Options,
}
_MARKED = re.compile(
    r"(<!-- options: ([\w-]+)( beside ([\w-]+)| restored)? -->\n).*?(<!-- /opt)", re.S
)


def option_table(command: str, beside: str | None = None) -> str:
    """Markdown: a line per option of the command, under the headings of its help."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    others = set() if beside is None else set(_lines(beside))
    lines += [line for line in _lines(command) if line not in others]
    return "\n".join(lines)


def _lines(command: str) -> list[str]:
    options_type = COMMANDS[command]
    methods, lines = methods_of(options_type), []
    for name, option, default in list_options(options_type):
        names = ", ".join(f"`{one}`" for one in option.flags(name))
        shown = option.describe_default(default).replace("|", "\\|")
        lines.append(f"| {names} | {shown} | {option.describe(methods)} |")
    return lines


def restored_list(command: str) -> str:
    """Markdown: the options that a checkpoint of the command restores, and those it never does."""
    options = options_of(COMMANDS[command])
    of_file: list[str] = []
    of_run: list[str] = []
    for name, option in options.items():
        (of_run if option.defines == "run" else of_file).append(f"`--{flag(name)}`")
    return (
        f"- `dynsparse {command}`, of the checkpoint: {', '.join(of_file)}.\n"
        f"- `dynsparse {command}`, of the command line alone: {', '.join(of_run)}."
    )


def fill(text: str) -> str:
    """The page with all its marked parts regenerated.

    Raises:
        ValueError: a command without such options.
    """

    def render(match: re.Match[str]) -> str:
        begin, command, what, beside, end = match.groups()
        for name in filter(None, (command, beside)):
            if name not in COMMANDS:
                raise ValueError(f"expected one of {', '.join(COMMANDS)}, got {name!r}")
        body = restored_list(command) if what == " restored" else option_table(command, beside)
        return f"{begin}\n{body}\n\n{end}"

    return _MARKED.sub(render, text)


def main(files: Sequence[str]) -> None:
    """Fill in the pages."""
    for file in map(Path, files):
        file.write_text(fill(file.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
