"""The modules of the data room import each other in one direction, inside functions too."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import dynsparse.data

ROOM = Path(dynsparse.data.__file__).parent


def imports_of(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.rpartition(".")[2] for name in modules if name.startswith("dynsparse.data.")}


def test_no_circle():
    graph = {file.stem: imports_of(file) for file in ROOM.glob("*.py")}
    assert "tokenizer" in graph
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("bpe") < order.index("tokenizer")
