"""torch's `parallelize_module` with the styles for sparse layers."""

from __future__ import annotations

import pytest
import torch
from processes import on_ranks
from split_runs import (
    Block,
    check_parallelize_module,
    make_model_and_input,
    train_and_compare,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dynsparse as ds


def test_parallelize_module_equals_one_process():
    model, _ = make_model_and_input()
    whole = sum(p.numel() for p in model.parameters())
    first, second = on_ranks(2, check_parallelize_module)
    shared = sum(model.get_submodule(n).bias.numel() for n in ("down", "last"))
    shared += model.attention.out_proj.bias.numel()
    assert first + second == whole + shared


@pytest.mark.parametrize(
    ("ranks", "algorithms"),
    [
        (2, ["rigl", "deepr", "topkast"]),
        pytest.param(4, ["rigl", "set", "deepr", "topkast"], marks=pytest.mark.slow),
    ],
)
def test_training_replicated_shards_equals_one_process(ranks, algorithms):
    for updates in on_ranks(ranks, train_and_compare, algorithms):
        assert all(updates)


@pytest.mark.slow
def test_training_fully_sharded_shards_equals_one_process():
    """The number of values in a shard changes, also under `fully_shard`."""
    algorithms = ["rigl", "set", "set-few", "deepr", "topkast", "gmp"]
    for updates in on_ranks(4, train_and_compare, algorithms, True):
        assert all(updates)


def test_styles_reject_other_modules(tmp_path):
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
