"""Makes README.md and pyproject.toml such that the page of a package index has no dead link.

    python .ci/index_page.py https://host/owner/repository REVISION

Run in the checkout that wheels and the source distribution are made from, by whoever knows where
the repository lies: links to its files become absolute, and `project.urls` is written. The working
tree holds no address, and needs none.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PICTURES = (".png", ".svg", ".gif", ".jpg")


def absolute(readme: str, repository: str, revision: str) -> str:
    """The text with links to files of the repository as addresses; others stay."""

    def address(found: re.Match[str]) -> str:
        target = found.group(2)
        if re.match(r"[a-z]+:|#", target):
            return found.group(0)
        view = "raw" if target.partition("#")[0].endswith(PICTURES) else "blob"
        return f"{found.group(1)}({repository}/{view}/{revision}/{target})"

    return re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", address, readme)


def urls(repository: str, revision: str) -> str:
    """The table `project.urls`."""
    return (
        "[project.urls]\n"
        f'Homepage = "{repository}"\n'
        f'Documentation = "{repository}/blob/{revision}/docs/index.md"\n'
        f'Changelog = "{repository}/blob/{revision}/CHANGELOG.md"\n'
        f'Issues = "{repository}/issues"\n'
    )


def main() -> None:
    if len(sys.argv) != 3 or not re.fullmatch(r"https://[\w.-]+/[\w./-]*\w", sys.argv[1]):
        sys.exit(f"expected https://host/owner/repository and a revision, got {sys.argv[1:]}")
    repository, revision = sys.argv[1:]
    root = Path.cwd()
    readme, project = root / "README.md", root / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(), repository, revision))
    text = project.read_text()
    if "[project.urls]" in text:
        sys.exit("expected a pyproject.toml without project.urls: this has been run here")
    before, scripts, after = text.partition("[project.scripts]\n")
    project.write_text(f"{before}{urls(repository, revision)}\n{scripts}{after}")


if __name__ == "__main__":
    main()
