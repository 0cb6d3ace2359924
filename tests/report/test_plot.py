"""Figures of models and records: their data, and readability with 100 layers."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.report import plot
from dynsparse.training.records import Recorder, Records

pytest.importorskip("matplotlib")


def deep(layers):
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(
        SparseLinear(12, 8, density=0.1 + 0.005 * i, generator=generator) for i in range(layers)
    )
    return model


def record(folder, layers):
    model = deep(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ds.SET(model, optimizer, total_steps=20, update_interval=3, seed=1)
    recorder = Recorder(folder, {})
    recorder.start({name: layer.pattern for name, layer in trainer.layers.items()})
    trainer.on_update.append(recorder.update)
    for _ in range(20):
        optimizer.step()
    return model, trainer


def overlaps(page, labels):
    """Return whether labels of an axis overlap."""
    page.draw_without_rendering()
    boxes = [label.get_window_extent() for label in labels if label.get_text()]
    return any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


def test_densities():
    model = deep(3)
    axes = plot(model).axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [layer.density for layer in model.blocks]
    assert [t.get_text() for t in axes.get_yticklabels()] == [f"blocks.{i}" for i in range(3)]


def test_dead_units():
    pattern = ds.SparsePattern([0, 0], [1, 2], shape=(4, 4))
    layer = SparseLinear(4, 4, pattern=pattern)
    page = plot(layer, "dead units")
    assert [bar.get_width() for bar in page.axes[0].patches] == [0.5, 0.75]
    whole = plot(SparseLinear(4, 4, density=1.0), "dead units")
    assert whole.axes[0].texts[0].get_text() == "every feature has a connection"


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("shape", [(512, 24), (24, 512), (8, 8), (600, 600)])
def test_connectivity(shape, block):
    pattern = ds.SparsePattern.random(shape, 0.2, block_size=block)
    layer = SparseLinear(*reversed(shape), pattern=pattern)
    page = plot(nn.Sequential(nn.ReLU(), layer), "connectivity", layer="1")
    cells = page.axes[0].images[0].get_array()
    assert cells.shape == tuple(min(256, n // block) for n in shape)
    assert 0 <= cells.min() <= cells.max() <= 1
    # Cells of several positions hold the share of those that are there.
    rows = np.bincount(np.arange(pattern.grid[0]) * cells.shape[0] // pattern.grid[0])
    cols = np.bincount(np.arange(pattern.grid[1]) * cells.shape[1] // pattern.grid[1])
    assert (cells * np.outer(rows, cols)).sum() == pytest.approx(pattern.nnz)


def test_churn(tmp_path):
    record(tmp_path, 2)
    records = Records.load(tmp_path)
    lines = plot(tmp_path, "churn").axes[0].lines
    for name, line in zip(records.layers, lines, strict=True):
        assert line.get_xdata().tolist() == records.steps[1:]
        assert line.get_ydata().tolist() == records.churn(name).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 7, 40, 41, 100])
def test_names_never_overlap(layers, tmp_path):
    model, trainer = record(tmp_path, layers)
    pages = [plot(model), plot(trainer, "dead units"), plot(tmp_path, "churn")]
    for page in pages:
        width, height = page.get_size_inches()
        assert max(width, height) < 12
        for labels in (page.axes[0].get_xticklabels(), page.axes[0].get_yticklabels()):
            assert not overlaps(page, labels)
    table = pages[2].axes[0].images
    assert len(table) == (layers > 6)
    if table:
        assert table[0].get_array().shape == (layers, trainer.updates)


def test_notebooks_show_figures(tmp_path):
    record(tmp_path, 1)
    for what in ("density", "dead units", "connectivity", "churn"):
        page = plot(str(tmp_path), what)
        assert page._repr_png_().startswith(b"\x89PNG")


def test_wrong_arguments():
    model = deep(2)
    with pytest.raises(ValueError, match=r"what must be one of 'density', 'conn.*, got 'colours'"):
        plot(model, "colours")
    with pytest.raises(ValueError, match=r"layer must be one of 'blocks.0', 'blocks.1', got 'x'"):
        plot(model, "connectivity", layer="x")
    with pytest.raises(ValueError, match="'density' shows all layers: leave layer out, got 'x'"):
        plot(model, layer="x")
    with pytest.raises(TypeError, match="churn needs a record: expected Records or the fo"):
        plot(model, "churn")
    with pytest.raises(ValueError, match="no sparse layers to show"):
        plot(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected a model, a trainer, Records or the folder of a"):
        plot(3)
