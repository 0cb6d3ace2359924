"""Every public name has its place in the API reference, or the strict build fails.

A hook of MkDocs (mkdocs.yml). What is public is what the modules that tests/api names list in
`__all__`, and what the integrations do.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import sys
from pathlib import Path
from typing import Any

from mkdocstrings import Inventory

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger("mkdocs.hooks.names")


class _ListsOfParameters(logging.Filter):
    """Lets through what griffe says of docstrings, but for its not knowing `rows, cols: ...`."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not ("No type or annotation for parameter '" in text and ", " in text.split("'")[1])


def on_startup(*, command: str, dirty: bool) -> None:
    logging.getLogger("mkdocs.plugins.griffe").addFilter(_ListsOfParameters())


def on_post_build(*, config: Any) -> None:
    with open(Path(config.site_dir, "objects.inv"), "rb") as file:
        documented = set(Inventory.parse_sphinx(file))
    for name in sorted(undocumented(documented)):
        log.warning(
            "%s is public and on no page: give it a docstring, and its module a page with "
            "`::: module` in docs/reference",
            name,
        )


def undocumented(documented: set[str]) -> set[str]:
    """The public names that are not among those documented, by any of the paths they have."""
    missing = set()
    for module_name in public_modules():
        module = importlib.import_module(module_name)
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing):
                continue
            home = getattr(thing, "__module__", module_name)
            paths = {f"{module_name}.{name}", f"{home}.{getattr(thing, '__qualname__', name)}"}
            if not paths & documented:
                missing.add(f"{module_name}.{name}")
    # They need their libraries to be imported: what they list is read.
    folder = ROOT / "src/dynsparse/integrations"
    for file in sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")]):
        module = file.parent.name if file.stem == "__init__" else file.stem
        names = {f"dynsparse.integrations.{module}.{name}" for name in listed(file)}
        missing |= names - documented
    poptorch = listed(ROOT / "src/popsparse/poptorch/__init__.py")
    return missing | ({f"popsparse.poptorch.{name}" for name in poptorch} - documented)


def public_modules() -> tuple[str, ...]:
    sys.path.insert(0, str(ROOT / "tests/api"))
    try:
        return importlib.import_module("recipes").MODULES
    finally:
        sys.path.remove(str(ROOT / "tests/api"))


def listed(file: Path) -> list[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []
