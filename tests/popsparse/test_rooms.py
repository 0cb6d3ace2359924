"""The rooms of popsparse: each knows only those below it, and a name in one means one thing."""

import ast
import pkgutil
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import dynsparse.popsparse as popsparse

ROOT = Path(popsparse.__file__).parent

# Ground up. Rooms of one line do not know each other.
FLOORS = (
    {"product"},
    {"cycles"},
    {"dense"},
    {"planner"},
    {"buckets"},
    {"timing"},
    {"device", "static", "tensor_ops", "block_sparse", "layer_file"},
    {"fully_connected", "matmul", "embedding", "layer"},
    {"embedding_layer"},
    {"torch_layer", "measure"},
    {"estimates"},
)


def rooms_used(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[2] for name in names if name.startswith("dynsparse.popsparse.")}
    return found


def test_a_room_knows_only_those_below_it():
    height = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    files = [file for file in ROOT.rglob("*.py") if file != ROOT / "__init__.py"]
    assert {file.relative_to(ROOT).parts[0].removesuffix(".py") for file in files} == set(height)
    for file in files:
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        for used in rooms_used(file) - {room}:
            assert height[used] < height[room], f"{file.relative_to(ROOT)} imports {used}"


@pytest.mark.parametrize(
    "room", ["", *(f".{one.name}" for one in pkgutil.iter_modules([str(ROOT)]) if one.ispkg)]
)
def test_no_public_name_hides_a_module(room):
    package = import_module(f"dynsparse.popsparse{room}")
    for one in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{one.name}")
        assert isinstance(getattr(package, one.name), ModuleType), f"{package.__name__}.{one.name}"
