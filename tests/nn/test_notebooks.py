"""HTML representations of patterns, models and trainers in notebooks."""

from xml.etree import ElementTree

import torch
from torch import nn

import dynsparse as ds
from dynsparse._core.html import html_table


def cells(page):
    """Return the texts of a table, row by row, and the lines below it."""
    root = ElementTree.fromstring(f"<body>{page}</body>")
    rows = [[cell.text or "" for cell in row] for row in root.iter("tr")]
    return rows, [line.text for line in root.iter("div")]


def test_texts_are_escaped():
    page = html_table([("<b>", "a & b")], head=("x", '"y"'), below=["1 < 2"])
    assert cells(page) == ([["x", '"y"'], ["<b>", "a & b"]], ["1 < 2"])


def test_patterns():
    rows, _ = cells(ds.SparsePattern([0, 1], [1, 0], shape=(8, 12), block_size=4)._repr_html_())
    assert rows[0] == ["SparsePattern", ""]
    assert rows[1:4] == [["shape", "(8, 12)"], ["block_size", "4"], ["nnz", "2"]]


def test_model_table_equals_the_text():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2), nn.Embedding(9, 8))
    ds.sparsify(model, density=0.25, exclude=["1"], verbose=False)
    said = ds.nn.describe(model)
    rows, below = cells(said._repr_html_())
    lines = said.splitlines()
    assert [row[0] for row in rows] == ["layer", "0", "1"]
    for row, line in zip(rows, lines, strict=False):
        assert " ".join(" ".join(row).split()) == " ".join(line.split())
    assert below == lines[len(rows) :]


def test_trainers():
    layer = ds.nn.SparseLinear(8, 8, density=0.5)
    trainer = ds.RigL(layer, torch.optim.SGD(layer.parameters(), lr=0.1), total_steps=50)
    rows, _ = cells(trainer._repr_html_())
    assert rows[0] == ["RigL", ""]
    assert dict(rows[1:]) == trainer.summary()
    assert dict(rows[1:])["next_update"] == "after step 5"
