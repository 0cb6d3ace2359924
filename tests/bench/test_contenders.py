"""All contenders of a benchmark cell compute the same, so their times are comparable."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import dynsparse as ds
from dynsparse._core.processor import available_memory
from dynsparse.bench.cells import Cell, refusal
from dynsparse.bench.contenders import (
    MaskedLinear,
    MklLinear,
    build_forwards,
    build_layer,
    build_network_steps,
    build_steps,
    build_update_parts,
    mask_layers,
)
from dynsparse.bench.host import medium_precision, medium_product_dtype, product_dtype
from dynsparse.training import CosineSchedule

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from masked_rigl import MaskedRigL

NEEDS_MKL = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
CELL = Cell((24, 16), 5, 0.3)
BLOCKS = Cell((24, 16), 5, 0.5, block=4)


@pytest.mark.parametrize("cell", [CELL, BLOCKS], ids=["elements", "blocks"])
def test_masked_and_dense_steps_equal_the_sparse_layer(cell):
    layer, work = build_steps(cell, ["masked", "dense"])
    dx, dw, db = work["dynsparse"]()
    for name in ("masked", "dense"):
        other_dx, other_dw, other_db = work[name]()
        assert_close(other_dx, dx)
        assert_close(other_db, db)
        assert_close(layer.pattern.values_of(other_dw), dw)
    masked_dw = work["masked"]()[1]
    assert not masked_dw[~layer.pattern.to_mask()].any()


@NEEDS_MKL
def test_mkl_step_equals_the_sparse_layer():
    layer, work = build_steps(CELL, ["mkl"])
    _, x, _ = build_layer(CELL)
    assert_close(MklLinear(layer)(x), layer(x))
    for gradient, own in zip(work["mkl"](), work["dynsparse"](), strict=True):
        assert_close(gradient, own)


@NEEDS_MKL
@pytest.mark.parametrize("cell", [CELL, BLOCKS], ids=["elements", "blocks"])
def test_all_forwards_agree(cell):
    _, work = build_forwards(cell, ["masked", "dense", "mkl", "bsr", "scipy"])
    y = work["dynsparse"]()
    assert {"masked", "dense", "scipy"} < work.keys()
    for name in work:
        assert_close(torch.as_tensor(work[name]()), y, msg=name)


def test_contenders_skip_unsupported_cells():
    names = ["masked", "dense", "mkl", "bsr", "scipy", "one_thread"]
    low = Cell((16, 16), 2, 0.5, dtype="bfloat16")
    assert list(build_forwards(low, names)[1]) == ["dynsparse", "masked", "dense"]
    assert "mkl" not in build_forwards(BLOCKS, names)[1]
    assert "bsr" not in build_forwards(CELL, names)[1]
    two = Cell((16, 16), 2, 0.5, threads=2)
    assert "one_thread" in build_forwards(two, names)[1]


NEEDS_ONEDNN = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"
)


def precision():
    """Restore torch's precision setting of CPU products."""
    return getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None)


@NEEDS_ONEDNN
def test_medium_precision_differs_by_bfloat16_rounding():
    before = precision()
    layer, work = build_steps(Cell((64, 48), 32, 0.3), ["masked_medium", "dense_medium"])
    assert list(work) == ["dynsparse", "masked_medium", "dense_medium"]
    dx, dw, db = work["dynsparse"]()
    for name in ("masked_medium", "dense_medium"):
        other_dx, other_dw, other_db = work[name]()
        assert_close(other_dx, dx, rtol=0.05, atol=0.05)
        assert_close(layer.pattern.values_of(other_dw), dw, rtol=0.05, atol=0.2)
        assert_close(other_db, db)
    assert precision() == before
    low = Cell((64, 48), 32, 0.3, dtype="bfloat16")
    assert list(build_steps(low, ["dense_medium"])[1]) == ["dynsparse"]


@NEEDS_ONEDNN
def test_medium_precision_equals_torch_setting(monkeypatch):
    before = precision()
    try:
        torch.set_float32_matmul_precision("medium")
        setting = precision()
    finally:
        torch.set_float32_matmul_precision("highest")
        if before is not None:
            torch.backends.mkldnn.matmul.fp32_precision = before
    with medium_precision():
        assert precision() == setting
    with pytest.raises(ZeroDivisionError), medium_precision():
        _ = 1 / 0
    assert precision() == before
    monkeypatch.setattr(torch.backends.mkldnn, "matmul", None)  # as before torch 2.9
    with medium_precision():
        assert torch.get_float32_matmul_precision() == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


def test_multiplied_dtype_is_detected_from_the_error():
    x, w = torch.randn(2, 96, 96)
    assert product_dtype(x @ w, x, w) == "float32"
    assert product_dtype(x.bfloat16().float() @ w.bfloat16().float(), x, w) == "bfloat16"
    assert medium_product_dtype() in ("float32", "bfloat16")


def test_one_thread_restores_the_number():
    _, work = build_steps(Cell((16, 16), 2, 0.5, threads=2), ["one_thread"])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        work["one_thread"]()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_network_uses_blocks_and_every_contender_steps():
    model, work = build_network_steps(Cell((32, 16, 10), 6, 0.5, block=4), ["masked", "dense"])
    assert [m.block_size for m in model if isinstance(m, ds.nn.SparseLinear)] == [4, 1]
    before = [p.clone() for p in model.parameters()]
    for step in work.values():
        step()
    assert not any(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_dense_twin_equals_the_network():
    model = nn.Sequential(ds.nn.SparseLinear(12, 8, 0.3), nn.ReLU(), nn.Linear(8, 3))
    twin = mask_layers(copy.deepcopy(model))
    x = torch.randn(4, 12)
    assert_close(twin(x), model(x))
    assert twin[2] is not model[2]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_masked_rigl_equals_rigl(momentum):
    model = nn.Sequential(
        ds.nn.SparseLinear(12, 16, 0.3, dtype=torch.float64),
        nn.Tanh(),
        ds.nn.SparseLinear(16, 8, 0.4, dtype=torch.float64),
    )
    twin = mask_layers(copy.deepcopy(model))
    schedule = CosineSchedule(20, update_interval=3)
    trainers = []
    for network in (model, twin):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=momentum)
        make = ds.RigL if network is model else MaskedRigL
        trainers.append(make(network, optimizer, schedule=schedule))
    start = model[0].pattern
    for _ in range(16):
        x = torch.randn(7, 12, dtype=torch.float64)
        for network, trainer in zip((model, twin), trainers, strict=True):
            trainer.optimizer.zero_grad()
            network(x).square().sum().backward()
            trainer.step()
    for layer, other in ((model[0], twin[0]), (model[2], twin[2])):
        assert isinstance(other, MaskedLinear)
        assert torch.equal(layer.pattern.to_mask(), other.mask.bool())
        assert_close(layer.to_dense(), other.weight * other.mask)
    assert model[0].pattern != start


def test_masked_rigl_without_gradient_raises():
    twin = mask_layers(nn.Sequential(ds.nn.SparseLinear(8, 8, 0.3)))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    trainer = MaskedRigL(twin, optimizer, CosineSchedule(10, update_interval=1))
    twin(torch.randn(2, 8))
    with pytest.raises(RuntimeError, match=r"call step\(\) after backward\(\)"):
        trainer.step()


@pytest.mark.parametrize("cell", [CELL, BLOCKS], ids=["elements", "blocks"])
def test_parts_of_an_update_equal_the_update(cell):
    layer, parts = build_update_parts(cell)
    pattern = layer.pattern
    count = int(0.3 * pattern.nnz)
    assert len(parts["drop"]()) == count
    grown = parts["growth"]()
    assert not pattern.contains(grown).any()
    assert torch.equal(grown.sort().values, parts["dense_topk"]().indices.sort().values)
    assert [len(tensor) for tensor in parts["rewiring"]()] == [pattern.nnz] * 3
    for own, fresh in zip(pattern.index, parts["encoding"](), strict=True):
        assert torch.equal(own, fresh)
    parts["step"]()
    parts["step_with_update"]()
    assert layer.pattern is pattern


def test_layers_of_cells_are_separate_and_not_empty():
    one, x, dy = build_layer(Cell((8, 4), 3, 0.001))
    assert (one.pattern.nnz, x.shape, dy.shape) == (1, (3, 8), (3, 4))
    first, _, _ = build_layer(CELL)
    second, _, _ = build_layer(CELL)
    assert first.pattern == second.pattern
    assert torch.equal(first.values, second.values)
    assert first.values is not second.values


def test_invalid_cells_raise():
    assert refusal(CELL, None) is None
    assert refusal(Cell((784, 300), 1, 0.1, block=8), None) == (
        "block 8 does not divide 300 features"
    )
    assert refusal(Cell((784, 300, 10), 1, 0.1, block=4), None) is None
    why = refusal(Cell((4096, 4096), 2048, 0.1), 10**8)
    assert why is not None
    assert "GB of memory, 0.1 GB are free: take a smaller layer or batch" in why
    available = available_memory()
    assert available is None or available > 0


def test_cell_descriptions():
    assert str(Cell((1024, 1024), 128, 0.1)) == "1024, batch 128, density 0.1"
    assert str(Cell((784, 300), 1, 0.1, block=4, dtype="bfloat16")) == (
        "784x300, batch 1, density 0.1, block 4, bfloat16"
    )
