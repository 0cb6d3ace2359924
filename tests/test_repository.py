"""The repository's metadata: README, Makefile, versions, docstrings, file sizes."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import re
import subprocess
from pathlib import Path

import pytest

import dynsparse

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def tracked_files() -> list[Path]:
    try:
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def declared_version() -> str:
    found = re.search(r'^version = "([^"]+)"$', PYPROJECT, flags=re.MULTILINE)
    assert found
    return found.group(1)


def test_readme_shows_both_commands():
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert re.search(rf"^make {command}\b", readme, flags=re.MULTILINE)
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony
    for target in set(phony.group(1).split()) - {"help", "lint"}:
        assert f"make {target} " in makefile


def test_ci_script_is_executable():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def test_no_machine_paths_in_tracked_files():
    # Written so that this file does not hold what it looks for.
    homes = re.compile(rb"(?<![\w./-])/(?:root|home/\w+|Users/\w+|wor" rb"k|tm" rb"p)/")
    for file in tracked_files():
        assert not homes.search(file.read_bytes()), file


def test_package_is_typed_and_licensed():
    for package in ("dynsparse", "popsparse"):
        assert (ROOT / "src" / package / "py.typed").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert 'license = "Apache-2.0"' in PYPROJECT


def test_versions_agree():
    version = declared_version()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    try:
        installed = importlib.metadata.version("dynsparse")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from a source tree that was never installed")
    assert installed == dynsparse.__version__ == version


def test_every_pinned_package_is_used():
    optional = r"^(?:cmake|ninja|mypy_extensions)$"  # of the build and of mypy
    wanted = re.sub(r"[-_.]+", "-", PYPROJECT.lower())
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, line
            if not re.match(optional, name):
                assert re.sub(r"[-_.]+", "-", name.lower()) in wanted, name


def test_every_public_name_has_a_docstring():
    for name in dynsparse.__all__:
        thing = getattr(dynsparse, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            for member, function in inspect.getmembers(thing, inspect.isfunction):
                own = function.__module__.startswith("dynsparse")
                if own and not member.startswith("_") and member not in ("forward", "extra_repr"):
                    assert inspect.getdoc(function), f"{name}.{member}"


def test_every_module_has_a_docstring():
    for file in sorted((ROOT / "src").rglob("*.py")):
        text = file.read_text()
        if text:
            assert ast.get_docstring(ast.parse(text)), f"{file.relative_to(ROOT)} has no docstring"


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_files_are_below_the_line_limit(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        lines = file.read_text().count("\n")
        assert lines <= 700, f"{file.relative_to(ROOT)} has {lines} lines: too long to read"


def places_of(table: str) -> set[str]:
    """Return the paths in the first column of a table; a bare name is next to the previous one."""
    found = set()
    for line in table.splitlines():
        folder = ""
        for place in re.findall(r"`([^`]+)`", line.split("|")[1]):
            folder = place.rstrip("/").rpartition("/")[0] if "/" in place.rstrip("/") else folder
            name = place.rstrip("/").rpartition("/")[2]
            found.add(f"{folder}/{name}".lstrip("/") + "/" * place.endswith("/"))
    return found


def test_table_of_folders_matches_the_tree():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(r"^## Where things live\n(.*?)^## ", text, flags=re.MULTILINE | re.DOTALL)
    assert section
    named = places_of("\n".join(re.findall(r"^\|.*", section.group(1), flags=re.MULTILINE)[2:]))
    tracked = {file.relative_to(ROOT).as_posix() for file in tracked_files()}
    existing = {f"{name.split('/')[0]}/" for name in tracked if "/" in name and name[0] != "."}
    existing.discard("src/")
    existing.add("src/popsparse/")
    package = "src/dynsparse/"
    for name in tracked:
        member, slash, _ = name.removeprefix(package).partition("/")
        if name.startswith(package) and (slash or member.endswith(".py")):
            existing.add(f"{package}{member}{slash}")
    assert named == existing - {f"{package}__init__.py"}


def test_paths_on_the_architecture_page_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert len(named) > 20
    inside = ["records/", "checkpoint/", "common/", "naive.py"]
    places = [ROOT, ROOT / "src", ROOT / "src" / "dynsparse"]
    missing = [n for n in named if n not in inside and not any((p / n).exists() for p in places)]
    missing += [n for n in inside if not any((ROOT / "src" / "dynsparse").glob(f"*/**/{n}"))]
    assert missing == []
