"""benchmarks/reinforcement.py: masked and sparse are equal, and averages follow patterns."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("gymnasium")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import reinforcement
from reinforcement import CONTENDERS, Networks, Transitions, measure_times, train


def settings(**changed):
    return argparse.Namespace(
        **{
            "task": "Pendulum-v1", "width": 64, "steps": 420, "start": 300, "interval": 10,
            "until": None, "rounds": 5, "seed": 0, "contenders": CONTENDERS,
            "contender": "rigl-0.1", "temperature": 0.1,
        } | changed
    )  # fmt: skip


@pytest.fixture
def transitions():
    held = Transitions(512, 3, 1)
    held.parts = [torch.randn(part.shape).double() for part in held.parts]
    held.parts[4].zero_()
    held.count = 512
    return held


def updates(contender, transitions, count=12):
    networks = Networks(contender, 3, 1, settings())
    for module in (networks.actor, networks.critics, networks.averages):
        module.double()
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = [networks.update(transitions.draw(generator)) for _ in range(count)]
    return networks, losses


def test_masked_and_static_learn_the_same(transitions):
    _, masked = updates("masked-0.1", transitions)
    _, static = updates("static-0.1", transitions)
    _, dense = updates("dense-wide", transitions)
    assert masked == pytest.approx(static, rel=1e-9)
    assert dense != pytest.approx(static, rel=1e-2)


def test_averages_follow_patterns(transitions):
    networks, _ = updates("rigl-0.1", transitions, 9)
    before = [critic[2].pattern for critic in networks.critics]
    generator = torch.Generator().manual_seed(3)
    networks.update(transitions.draw(generator))  # the tenth: RigL's
    for critic, average, old in zip(
        networks.critics, networks.averages.module, before, strict=True
    ):
        assert critic[2].pattern == average[2].pattern != old


def test_training_records_episodes():
    found = train(settings())
    assert [step for step, _ in found["episodes"]] == [200, 400]
    assert all(-2000 < total < 0 for _, total in found["episodes"])


def test_training_ends_at_a_target_return():
    episodes = train(settings(steps=1400, until=-2000.0))["episodes"]
    assert [step for step, _ in episodes] == [200, 400, 600, 800, 1000]  # the mean of five is above


def test_narrow_network_has_equal_weights():
    narrow = reinforcement.narrow_width(3, 2, 2048, 0.1)
    assert narrow * (narrow + 5) == pytest.approx(0.1 * 2048**2 + 2048 * 5, rel=2e-3)


def test_times():
    found = measure_times(settings())["over dense-wide"]
    assert set(found) == set(CONTENDERS)
    assert all(low <= middle <= high for low, middle, high in found.values())
