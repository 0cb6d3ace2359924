"""Which packages may import which: layers, no import from a higher layer, no circular import.

Every import statement counts, also inside functions and under TYPE_CHECKING. Within a folder each
member, a module or a package, counts with all imports made inside it. If the members of every
folder import each other without a circle, there is no circular import among packages or modules.

There are two import packages. `popsparse` imports `dynsparse`; `dynsparse` imports nothing of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
PACKAGE = "dynsparse"
MACHINE = "popsparse"

BASE = ["_core", "options", "tracing", "pattern", "allocation"]
LAYERS = [
    BASE,
    ["ops"],
    ["nn", "ranks"],
    ["training"],
    ["distributed"],
    ["integrations", "apps"],
    ["__init__"],  # the public names of `import dynsparse`
    ["cli"],
]
"""From the lowest up: each package imports from its own layer and those below."""

MACHINE_LAYERS = [
    ["machine", "formats"],
    ["planning"],
    ["dense", "encoding"],
    ["timing"],
    ["static_timing"],
    ["plans", "programs"],
    ["static", "tensor_ops", "block_sparse"],
    ["products", "embedding", "layer"],
    ["torch_layer", "measure", "triplets"],
    ["estimates", "compiled"],
    ["__init__"],
    ["report"],
    ["poptorch"],
    ["cli"],
]
"""Those of popsparse; packages of one layer do not import each other."""

BESIDE = {
    "data": [*BASE],
    "selfcheck": [*BASE, "ops"],
    "bench": [*BASE, "ops", "nn", "training", "integrations"],
    "report": [*BASE, "nn", "training", "bench"],
    **{
        f"{MACHINE}.{package}": [
            *(BASE if package == "machine" else [*BASE, "ops", "nn", "training"]),
            *(f"{MACHINE}.{one}" for below in MACHINE_LAYERS[:layer] for one in below),
        ]
        for layer, packages in enumerate(MACHINE_LAYERS)
        for package in packages
    },
}
"""Packages beside the layers, and all that each imports from."""

IMPORTS_BESIDE = {
    "__init__": ["report"],  # by ds.__getattr__
    "apps": ["data", "report"],
    "cli": ["data", "selfcheck", "bench", "report"],
}
"""What packages of the layers import from those beside them."""

Edges = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Return {dotted name: file} of the packages in `root`; packages appear as x.__init__."""
    files = sorted(root.rglob("*.py"))
    return {".".join(file.relative_to(root).with_suffix("").parts): file for file in files}


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """Return the dotted names that a module imports: modules, or names in modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in ("import_module", "__import__") and node.args:
                asked = node.args[0]
                if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
                    yield asked.value


def edges_of(root: Path) -> Edges:
    """Return {module: imported modules} of the packages in `root`; packages are x.__init__."""
    files = modules(root)

    def module_of(asked: str) -> str | None:
        """Return the imported module for a dotted name of a module or of a name in one."""
        while asked:
            for found in (asked, f"{asked}.__init__"):
                if found in files:
                    return found
            asked = asked.rpartition(".")[0]
        return None

    edges: Edges = {}
    for name, file in files.items():
        asked = imported(name, ast.parse(file.read_text(encoding="utf-8")))
        edges[name] = {found for one in asked if (found := module_of(one))} - {name}
    return edges


def package_of(name: str) -> str:
    """Return the first name below the import package, with its prefix for popsparse."""
    root, name = name.split(".")[:2]
    return name if root == PACKAGE else f"{root}.{name}"


def upward_imports(edges: Edges) -> list[tuple[str, str]]:
    """Return the imports that the layers do not allow."""
    allowed = {package: {*others} for package, others in BESIDE.items()}
    below: set[str] = set()
    for layer in LAYERS:
        below |= {*layer}
        for package in layer:
            allowed[package] = below | {*IMPORTS_BESIDE.get(package, ())}
    wrong = []
    for importer, found in edges.items():
        package = package_of(importer)
        for one in sorted(found):
            other = package_of(one)
            if other != package and other not in allowed.get(package, ()):
                wrong.append((importer, one))
    return wrong


def folders_of(edges: Edges) -> list[str]:
    """Return every folder that contains a file, directly or below it."""
    parts = [name.split(".")[:-1] for name in edges]
    return sorted({".".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)})


def imports_among(folder: str, edges: Edges) -> Edges:
    """Return the imports among the members of a folder."""
    seen: Edges = {}
    prefix = f"{folder}."
    for importer, found in edges.items():
        if importer.startswith(prefix):
            member = importer[len(prefix) :].split(".")[0]
            inside = {one[len(prefix) :].split(".")[0] for one in found if one.startswith(prefix)}
            seen.setdefault(member, set()).update(inside - {member})
    return seen


def find_cycle(edges: Edges) -> list[str] | None:
    """Return a cycle, with its first name repeated at the end, or None."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for other in sorted(edges.get(name, ())):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return None

    return next((found for name in sorted(edges) if (found := walk(name, []))), None)


@pytest.fixture(scope="module")
def edges() -> Edges:
    """Return the imports of both packages."""
    return edges_of(SOURCE)


def test_every_package_has_a_layer(edges):
    packages = {package_of(name) for name in edges}
    assert packages <= {package for layer in LAYERS for package in layer} | {*BESIDE}


def test_no_upward_imports(edges):
    assert upward_imports(edges) == []


def test_no_cycles_within_folders(edges):
    found = {folder: find_cycle(imports_among(folder, edges)) for folder in folders_of(edges)}
    assert {folder: way for folder, way in found.items() if way} == {}


def written(root: Path, **files: str) -> Edges:
    """Write a package with these files, `a__b` for a/b.py, and return its imports."""
    for name, text in files.items():
        file = root / PACKAGE / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for folder in [root / PACKAGE, file.parent]:
            (folder / "__init__.py").touch()
    return edges_of(root)


@pytest.mark.parametrize(
    "text",
    [
        "from dynsparse.nn import linear",
        "from dynsparse.nn.linear import forward",
        "import dynsparse.nn.linear as linear",
        "from ..nn.linear import forward",
        "def f():\n    from dynsparse.nn import linear",
        "if TYPE_CHECKING:\n    from dynsparse.nn.linear import Layer",
        "import importlib\nimportlib.import_module('dynsparse.nn.linear')",
    ],
)
def test_upward_imports_of_any_form_are_found(tmp_path, text):
    edges = written(tmp_path, ops__products=text, nn__linear="import torch")
    assert upward_imports(edges) == [("dynsparse.ops.products", "dynsparse.nn.linear")]


def test_dynsparse_must_not_import_popsparse(tmp_path):
    machine = tmp_path / MACHINE
    (machine / "machine").mkdir(parents=True)
    (machine / "__init__.py").write_text("from popsparse.machine import Target")
    (machine / "machine" / "__init__.py").write_text("from dynsparse.pattern import SparsePattern")
    text = "from popsparse import Target"
    edges = written(tmp_path, nn__layer=text, apps__training=text, cli__app=text, pattern="")
    importers = ["dynsparse.apps.training", "dynsparse.cli.app", "dynsparse.nn.layer"]
    assert upward_imports(edges) == [(importer, "popsparse.__init__") for importer in importers]
    (machine / "machine" / "__init__.py").write_text("from dynsparse.nn import layer")
    assert len(upward_imports(edges_of(tmp_path))) == 4


def test_cycle_among_packages_without_a_cycle_of_files_is_found(tmp_path):
    edges = written(
        tmp_path,
        nn__one__a="from dynsparse.nn.two import b",
        nn__two__b="",
        nn__two__c="from dynsparse.nn.one import d",
        nn__one__d="",
    )
    assert upward_imports(edges) == []
    assert find_cycle(imports_among("dynsparse.nn", edges)) == ["one", "two", "one"]
    assert find_cycle(imports_among("dynsparse.nn.one", edges)) is None


def test_module_that_imports_its_package_is_a_cycle(tmp_path):
    edges = written(tmp_path, nn__linear="from dynsparse.nn import other")
    (tmp_path / PACKAGE / "nn" / "__init__.py").write_text("from dynsparse.nn.linear import x")
    edges = edges_of(tmp_path)
    assert find_cycle(imports_among("dynsparse.nn", edges)) == ["__init__", "linear", "__init__"]
