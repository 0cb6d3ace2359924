"""torch's `parallelize_module` with styles for sparse layers: in one process and on gloo ranks."""

from __future__ import annotations

import pytest
import torch
from processes import on_ranks
from split_runs import Block, made, meshed, parallelized, trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dynsparse as ds


def test_two_processes_compute_what_one_does():
    model, _ = made()
    whole = sum(p.numel() for p in model.parameters())
    first, second = on_ranks(2, parallelized)
    shared = sum(model.get_submodule(n).bias.numel() for n in ("down", "last"))
    shared += model.attention.out_proj.bias.numel()
    assert first + second == whole + shared


@pytest.mark.slow
def test_four_processes_split_layers_and_samples():
    assert on_ranks(4, meshed) == [True] * 4


@pytest.mark.parametrize(
    ("ranks", "algorithms"),
    [
        (2, ["rigl", "deepr", "topkast"]),
        pytest.param(4, ["rigl", "set", "deepr", "topkast"], marks=pytest.mark.slow),
    ],
)
def test_processes_train_rectangles_and_replicas_as_one_process(ranks, algorithms):
    for updates in on_ranks(ranks, trained, algorithms):
        assert all(updates)


@pytest.mark.slow
def test_processes_train_rectangles_whose_values_are_sharded():
    """The number of values in a rectangle changes, also where they are shared out."""
    algorithms = ["rigl", "set", "deepr", "topkast", "gmp"]
    for updates in on_ranks(4, trained, algorithms, True):
        assert all(updates)


def test_styles_for_other_modules_are_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        d = ds.distributed
        with pytest.raises(TypeError, match=r"expected a SparseLinear in Linear, got Linear"):
            d.SplitRows()._apply(nn.Linear(3, 3), mesh)
        with pytest.raises(
            TypeError, match=r"expected a SparseLinear named 'a' in Block, got None"
        ):
            d.SplitPair("a", "b")._apply(Block(), mesh)
        with pytest.raises(ValueError, match=r"'up' writes 64 features and 'wide' reads 24"):
            d.SplitPair("up", "wide")._apply(Block(), mesh)
        with pytest.raises(TypeError, match=r"expected a SparseMultiheadAttention, got Block"):
            d.SplitHeads()._apply(Block(), mesh)
    finally:
        torch.distributed.destroy_process_group()
