"""Benchmarks of other libraries use the same weights and skip wrong results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.bench.timing import Effort

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import peers

SHORT = Effort(seconds=0, rounds=1, foreign=1)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(peers, "FEATURES", (64,))
    monkeypatch.setattr(peers, "DENSITIES", (0.1,))
    monkeypatch.setattr(peers, "BATCHES", (16,))
    # Compiling takes longer than all the rest.
    monkeypatch.setitem(peers.PEERS, "masked, compiled", peers.MaskedLinear)
    for name, value in {"WIDTH": 32, "HEADS": 2, "DEPTH": 2, "LENGTH": 16, "SEQUENCES": 2}.items():
        monkeypatch.setattr(peers, name, value)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_row_has_a_result_or_reason_per_library(small, monkeypatch):
    def missing(layer):
        raise ImportError("No module named 'sparseprop'")

    class Wrong(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    monkeypatch.setitem(peers.PEERS, "SparseProp", missing)
    monkeypatch.setitem(peers.PEERS, "sparselab", lambda layer: Wrong(64, 64))
    (row,) = peers.compare_layers(1, SHORT)
    assert "not installed" in row["excluded"]["SparseProp"]
    assert "wrong" in row["excluded"]["sparselab"]
    assert {"masked, compiled", "dense"} <= row["ratios"].keys() <= peers.PEERS.keys()


def test_gpt_steps_sparse_and_dense(small):
    text = peers.read_text(None)
    sparse, dense = (peers.Training(name, text) for name in ("dynsparse", "dense"))
    assert sum(isinstance(m, ds.nn.SparseLinear) for m in sparse.model.modules()) == 8
    sparse.step()
    dense.step()
    assert sparse.loss == pytest.approx(dense.loss, rel=1e-5)
    layer, twin = sparse.model.blocks[0].up, dense.model.blocks[0].up
    mask = layer.pattern.to_mask()
    torch.testing.assert_close(layer.to_dense()[mask], twin.weight[mask], rtol=1e-4, atol=1e-6)


def test_sparselab_gets_the_same_weights(small):
    pytest.importorskip("sparselab")
    text = peers.read_text(None)
    ours, theirs = (peers.Training(name, text) for name in ("dynsparse", "sparselab"))
    for _ in range(3):
        ours.step()
        theirs.step()
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
