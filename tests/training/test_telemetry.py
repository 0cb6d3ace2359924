"""Connectivity figures, compared with counts of masks."""

import json

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training import ConstantSchedule, Telemetry


def test_by_hand():
    pattern = SparsePattern.from_flat(torch.tensor([0, 2, 3]), shape=(2, 3))
    layer = SparseLinear(3, 2, pattern=pattern)
    trainer = ds.Static(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    telemetry = Telemetry(trainer)
    assert telemetry.figures()["/exploration"] == 0.5
    assert telemetry.figures()["/dead_inputs"] == 1  # the input 1
    rewiring = Rewiring.make(layer.pattern, torch.tensor([2]), torch.tensor([1]))
    layer.rewire(rewiring)
    for hook in trainer.on_update:
        hook(1, {"": rewiring})
    figures = telemetry.figures()
    assert figures == {
        f"{name}/{key}": pytest.approx(value)
        for name in ("", "all")
        for key, value in {
            "blocks": 3, "density": 0.5, "churn": 1 / 3, "jaccard": 0.5, "survival": 2 / 3,
            "exploration": 4 / 6, "dead_inputs": 0, "dead_outputs": 1, "zero_outputs": 1,
        }.items()
    }  # fmt: skip
    with torch.no_grad():
        layer.values.zero_()
    assert telemetry.figures()["/zero_outputs"] == 2
    assert telemetry.figures()["/dead_outputs"] == 1


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("kind", ["set", "snfs", "granet"])
def test_equals_counts_of_masks(kind, b):
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        SparseLinear(18, 14, 0.3, b, generator=g), nn.ReLU(), SparseLinear(14, 6, 0.4, b)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "set":
        trainer = ds.SET(model, optimizer, schedule=ConstantSchedule(99, 2, 0.4), seed=1)
    elif kind == "snfs":
        trainer = ds.SNFS(model, optimizer, schedule=ConstantSchedule(99, 2, 0.4))
    else:
        trainer = ds.GraNet(model, optimizer, total_steps=99, update_interval=2, final_density=0.1)
    telemetry = Telemetry(trainer)
    first = {n: layer.pattern.to_mask() for n, layer in trainer.layers.items()}
    ever = {n: m.clone() for n, m in first.items()}
    kept = {n: m.clone() for n, m in first.items()}
    before = dict(first)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 18)).square().mean().backward()
        if trainer.step() is None:
            continue
        figures = telemetry.figures()
        json.dumps(figures)
        for n, layer in trainer.layers.items():
            now = layer.pattern.to_mask()
            ever[n] |= now
            kept[n] &= now
            lost = before[n] & ~now
            expected = {
                "blocks": now.sum() / b**2,
                "density": now.double().mean(),
                "churn": lost.sum() / before[n].sum(),
                "jaccard": (now & before[n]).sum() / (now | before[n]).sum(),
                "survival": kept[n].sum() / first[n].sum(),
                "exploration": ever[n].double().mean(),
                "dead_inputs": (~now.any(0)).sum(),
                "dead_outputs": (~now.any(1)).sum(),
                "zero_outputs": (layer.to_dense() == 0).all(1).sum(),
            }
            for key, value in expected.items():
                assert figures[f"{n}/{key}"] == pytest.approx(float(value)), key
            before[n] = now
        whole = sum(m.sum() for m in ever.values()) / sum(m.numel() for m in ever.values())
        assert figures["all/exploration"] == pytest.approx(float(whole))


def test_state_of_other_layers_raises():
    model = nn.Sequential(SparseLinear(8, 8, 0.3), SparseLinear(8, 8, 0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = Telemetry(ds.Static(model, optimizer)).state_dict()
    one = nn.Sequential(SparseLinear(8, 8, 0.5))
    telemetry = Telemetry(ds.Static(one, torch.optim.SGD(one.parameters(), lr=0.1)))
    with pytest.raises(ValueError, match=r"\[positions, blocks\] = \[64, 19\], the layer has"):
        telemetry.load_state_dict(state)
    with pytest.raises(ValueError, match="saved without the layer '0'"):
        telemetry.load_state_dict({})
