"""Who may import whom: floors from the ground up, no way up, no circle, at any time.

Every import statement counts, those inside functions and under TYPE_CHECKING too. A folder is a
room; its `__init__.py` is the room's door. Seen from a folder, whatever lies in it, file or room,
is one thing: what is imported inside it counts as its own. Where there is no circle among the
things of every folder, there is none among rooms or files anywhere.

There are two packages. `popsparse` imports `dynsparse`; of `dynsparse` only the applications and
the command import `popsparse`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
PACKAGE = "dynsparse"
MACHINE = "popsparse"

GROUND = [
    "logs",
    "processor",
    "native",
    "checks",
    "options",
    "typed",
    "interrupts",
    "version",
    "files",
    "tracing",
    "pattern",
    "allocation",
]
FLOORS = [
    GROUND,
    ["ops"],
    ["nn", "ranks"],
    ["training"],
    ["distributed"],
    ["integrations", "apps"],
    ["__init__"],  # the front door: what `import dynsparse` shows
    ["cli"],
]
"""From the ground up: each imports from its own floor and from those below."""

MACHINE_FLOORS = [
    ["machine", "formats"],
    ["planning"],
    ["dense", "encoding"],
    ["timing"],
    ["static_timing"],
    ["plans", "programs"],
    ["static", "tensor_ops", "block_sparse"],
    ["products", "embedding", "layer"],
    ["torch_layer", "measure"],
    ["estimates"],
    ["__init__"],
    ["report", "poptorch"],
]
"""Those of popsparse; rooms of one line do not import each other."""

BESIDE = {
    "data": [*GROUND],
    "selfcheck": [*GROUND, "ops"],
    "bench": [*GROUND, "ops", "nn", "training"],
    "report": [*GROUND, "nn", "training", "bench"],
    **{
        f"{MACHINE}.{room}": [
            *(GROUND if room == "machine" else [*GROUND, "ops", "nn", "training"]),
            *(f"{MACHINE}.{one}" for below in MACHINE_FLOORS[:floor] for one in below),
        ]
        for floor, rooms in enumerate(MACHINE_FLOORS)
        for room in rooms
    },
}
"""What stands beside the floors, and all that it imports from."""

FROM_THE_SIDE = {
    "__init__": ["report"],  # where it is asked for
    "apps": ["data", "report", f"{MACHINE}.__init__"],
    "cli": [*BESIDE],
}
"""What the floors import from what stands beside them."""

Edges = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of a package in `root`; a room's door is named as the file is."""
    files = sorted(root.rglob("*.py"))
    return {".".join(file.relative_to(root).with_suffix("").parts): file for file in files}


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """The dotted names that a module asks for: modules, or modules and a name in them."""
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
    """Module -> the modules it imports, of all packages in `root`; doors as x.__init__."""
    files = modules(root)

    def module_of(asked: str) -> str | None:
        """The file that is run: a name in a module is that module's."""
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


def room_of(name: str) -> str:
    """Its name; in popsparse with the package's."""
    package, room = name.split(".")[:2]
    return room if package == PACKAGE else f"{package}.{room}"


def ways_up(edges: Edges) -> list[tuple[str, str]]:
    """Imports that no floor allows."""
    allowed = {room: {*others} for room, others in BESIDE.items()}
    below: set[str] = set()
    for floor in FLOORS:
        below |= {*floor}
        for room in floor:
            allowed[room] = below | {*FROM_THE_SIDE.get(room, ())}
    wrong = []
    for importer, found in edges.items():
        room = room_of(importer)
        for one in sorted(found):
            other = room_of(one)
            if other != room and other not in allowed.get(room, ()):
                wrong.append((importer, one))
    return wrong


def folders_of(edges: Edges) -> list[str]:
    """Every folder with a file in it or below it."""
    parts = [name.split(".")[:-1] for name in edges]
    return sorted({".".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)})


def among(folder: str, edges: Edges) -> Edges:
    """The imports among the things of a folder, each file in them counted as the thing itself."""
    seen: Edges = {}
    prefix = f"{folder}."
    for importer, found in edges.items():
        if importer.startswith(prefix):
            thing = importer[len(prefix) :].split(".")[0]
            inside = {one[len(prefix) :].split(".")[0] for one in found if one.startswith(prefix)}
            seen.setdefault(thing, set()).update(inside - {thing})
    return seen


def circle(edges: Edges) -> list[str] | None:
    """Some circle, its first name repeated at the end; None where there is none."""
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
    """Of both packages."""
    return edges_of(SOURCE)


def test_every_room_stands_on_a_floor_or_beside_one(edges):
    rooms = {room_of(name) for name in edges}
    assert rooms <= {room for floor in FLOORS for room in floor} | {*BESIDE}


def test_no_import_goes_up(edges):
    assert ways_up(edges) == []


def test_no_circle_among_the_rooms_and_files_of_any_folder(edges):
    found = {folder: circle(among(folder, edges)) for folder in folders_of(edges)}
    assert {folder: way for folder, way in found.items() if way} == {}


def written(root: Path, **files: str) -> Edges:
    """The imports of a package of these files, `a__b` for a/b.py."""
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
def test_a_way_up_is_found_however_it_is_written(tmp_path, text):
    edges = written(tmp_path, ops__products=text, nn__linear="import torch")
    assert ways_up(edges) == [("dynsparse.ops.products", "dynsparse.nn.linear")]


def test_popsparse_is_above_the_library_and_below_applications_and_the_command(tmp_path):
    machine = tmp_path / MACHINE
    (machine / "machine").mkdir(parents=True)
    (machine / "__init__.py").write_text("from popsparse.machine import Target")
    (machine / "machine" / "__init__.py").write_text("from dynsparse.pattern import SparsePattern")
    text = "from popsparse import Target"
    edges = written(tmp_path, nn__layer=text, apps__training=text, cli__app=text, pattern="")
    assert ways_up(edges) == [("dynsparse.nn.layer", "popsparse.__init__")]
    (machine / "machine" / "__init__.py").write_text("from dynsparse.nn import layer")
    assert len(ways_up(edges_of(tmp_path))) == 2


def test_a_circle_among_rooms_is_found_where_no_two_files_make_one(tmp_path):
    edges = written(
        tmp_path,
        nn__one__a="from dynsparse.nn.two import b",
        nn__two__b="",
        nn__two__c="from dynsparse.nn.one import d",
        nn__one__d="",
    )
    assert ways_up(edges) == []
    assert circle(among("dynsparse.nn", edges)) == ["one", "two", "one"]
    assert circle(among("dynsparse.nn.one", edges)) is None


def test_a_file_that_asks_at_its_own_door_goes_in_a_circle(tmp_path):
    edges = written(tmp_path, nn__linear="from dynsparse.nn import other")
    (tmp_path / PACKAGE / "nn" / "__init__.py").write_text("from dynsparse.nn.linear import x")
    edges = edges_of(tmp_path)
    assert circle(among("dynsparse.nn", edges)) == ["__init__", "linear", "__init__"]
