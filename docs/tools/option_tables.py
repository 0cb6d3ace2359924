"""The tables of options in the docs, made from the options themselves.

    python docs/tools/option_tables.py docs/*.md

fills in what stands between `<!-- options: COMMAND -->` and `<!-- /options -->`: all options of a
command; with `<!-- options: COMMAND beside OTHER -->` those that the other does not have alike;
with `<!-- options: COMMAND restored -->` which of them a checkpoint decides.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from dynsparse.apps import lm
from dynsparse.apps.pictures import cifar, mnist, transformer
from dynsparse.options import flag, listed_options, methods_of, options_of

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
    """Markdown: a line per option of the command, by the headings of its help."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    known = set() if beside is None else set(_lines(beside))
    lines += [line for line in _lines(command) if line not in known]
    return "\n".join(lines)


def _lines(command: str) -> list[str]:
    options_type = COMMANDS[command]
    methods, lines = methods_of(options_type), []
    for name, option, default in listed_options(options_type):
        names = ", ".join(f"`{one}`" for one in option.flags(name))
        shown = option.describe_default(default).replace("|", "\\|")
        lines.append(f"| {names} | {shown} | {option.describe(methods)} |")
    return lines


def restored_list(command: str) -> str:
    """Markdown: which options a checkpoint of the command decides, and which it never does."""
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
    """A page with all its marked parts made anew.

    Raises:
        ValueError: a command that has no such options.
    """

    def made(match: re.Match[str]) -> str:
        begin, command, what, beside, end = match.groups()
        for name in filter(None, (command, beside)):
            if name not in COMMANDS:
                raise ValueError(f"expected one of {', '.join(COMMANDS)}, got {name!r}")
        body = restored_list(command) if what == " restored" else option_table(command, beside)
        return f"{begin}\n{body}\n\n{end}"

    return _MARKED.sub(made, text)


def main(files: Sequence[str]) -> None:
    """Fill in the pages."""
    for file in map(Path, files):
        file.write_text(fill(file.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
