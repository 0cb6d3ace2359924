"""The entry point of the `dynsparse` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exit status 2 and one line for anything the user can fix."""
    try:
        from dynsparse.cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"dynsparse: the command line needs the package {error.name}: pip install {error.name}",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(run())


if __name__ == "__main__":
    main()
