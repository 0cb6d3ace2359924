"""`dynsparse cache`: what earlier runs have kept on the disk."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dynsparse.files.cache import Kept, open_cache

__all__ = ["cache"]

cache = typer.Typer(help="Show or remove the results that earlier runs have kept on the disk.")


@cache.command("info")
def info_command(
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON instead.")] = False,
) -> None:
    """Show the folder, what of each kind is there, and the limit."""
    found = open_cache()
    kinds = found.kinds()
    total = Kept(sum(one.entries for one in kinds.values()), sum(k.bytes for k in kinds.values()))
    if json:
        plain = {kind: vars(one) for kind, one in kinds.items()}
        facts = {"folder": str(found.folder), "limit": found.limit, "kinds": plain, **vars(total)}
        print(dumps(facts, indent=2))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", justify="right")
    table.add_column()
    table.add_row("folder", str(found.folder))
    for kind, one in kinds.items():
        table.add_row(kind, _words(one))
    table.add_row("together", _words(total))
    table.add_row("limit", f"{found.limit:,} bytes" if found.limit else "0: the cache is off")
    Console().print(table, highlight=False, soft_wrap=True)


@cache.command("clear")
def clear_command() -> None:
    """Remove all of them. Downloaded data stays."""
    found = open_cache()
    Console().print(
        f"removed {_words(found.clear())} from {found.folder}", highlight=False, soft_wrap=True
    )


def _words(kept: Kept) -> str:
    entries = "entry" if kept.entries == 1 else "entries"
    return f"{kept.entries:,} {entries}, {kept.bytes:,} bytes"
