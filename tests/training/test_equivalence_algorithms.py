"""Algorithms of fixed capacity equal masked dense trainings, step by step."""

import pytest
import torch
from masked_twins import (
    INTERVAL,
    RATE,
    STEPS,
    adopt,
    compare,
    cosine,
    count_lowest,
    due,
    largest,
    lowest,
    magnitudes,
)

import dynsparse as ds
from dynsparse.training import GradientStep


@pytest.mark.parametrize("b", [1, 2])
def test_mest(b):
    def rule(step, twin, layers, trainer):
        if not due(step):
            return
        for i, layer in enumerate(layers):
            present = twin.present[i]
            count = cosine(step, 90, 0.4, int(present.sum()))
            score = twin.pool(twin.weights[i].abs() + 0.5 * twin.grads[i].abs())
            dropped = lowest(score, present, count)
            twin.rewire(i, (present & ~dropped) | adopt(layer, twin, i, count, present))

    compare(
        lambda model, optimizer: ds.MEST(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, drop_fraction=0.4,
            gradient_weight=0.5, seed=3,
        ),
        rule, b=b, updates=4,
    )  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("b", [1, 2])
def test_top_kast(b, adam):
    pull = 0.01

    def choose(twin):
        for i, present in enumerate(twin.present):
            count = max(1, round(0.4 * int(present.sum())))
            twin.used[i] = largest(twin.pool(twin.weights[i].abs()), present, count)

    def prepare(twin, layers, trainer):
        choose(twin)

        def penalty(i, weight):
            density = float(twin.used[i].double().mean())
            used, mask = twin.active(i), twin.mask(i)
            return pull * weight * (used + (mask - used) / density)

        twin.penalty = penalty

    def rule(step, twin, layers, trainer):
        if step % INTERVAL or step == STEPS:
            return
        for i, layer in enumerate(layers):
            present = twin.present[i]
            spare = int(present.sum()) - int(twin.used[i].sum())
            count = cosine(step, STEPS, 0.3, spare)
            dropped = lowest(twin.pool(twin.weights[i].abs()), present, count)
            twin.rewire(i, (present & ~dropped) | adopt(layer, twin, i, count, present))
        choose(twin)
        for i, layer in enumerate(layers):
            active = twin.pool(layer.active.pattern.to_mask().double()) > 0
            assert torch.equal(active, twin.used[i])

    compare(
        lambda model, optimizer: ds.TopKAST(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, drop_fraction=0.3,
            forward_fraction=0.4, exploration=pull, seed=5,
        ),
        rule, b=b, adam=adam, prepare=prepare, updates=5,
    )  # fmt: skip


@pytest.mark.parametrize("b", [1, 2])
def test_deepr(b):
    signs = []

    def prepare(twin, layers, trainer):
        signs.extend(w.sign() for w in twin.weights)

    def rule(step, twin, layers, trainer):
        for i, layer in enumerate(layers):
            present = twin.present[i]
            twin.weights[i] -= RATE * 0.03 * signs[i] * twin.mask(i)
            if step % 4 or step == STEPS:
                continue
            dropped = (twin.pool(twin.weights[i] * signs[i]) < 0) & present
            count = int(dropped.sum())
            grown = adopt(layer, twin, i, count, present)
            twin.rewire(i, (present & ~dropped) | grown)
            drawn = layer.pattern.to_dense(trainer.signs[str(2 * i)].double())
            assert set(drawn[twin.mask(i) > 0].tolist()) <= {-1.0, 1.0}
            survivors = twin.spread(twin.present[i] & ~grown)
            assert torch.equal(drawn[survivors], signs[i][survivors])
            signs[i] = drawn

    compare(
        lambda model, optimizer: ds.DeepR(
            model, optimizer, total_steps=STEPS, update_interval=4, l1=0.03, seed=2
        ),
        rule, b=b, prepare=prepare, updates=29 if b == 1 else 22,
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("regrow_dropped", [False, True])
@pytest.mark.parametrize("b", [1, 2])
def test_rigl(b, regrow_dropped, adam):
    def rule(step, twin, layers, trainer):
        if not due(step):
            return
        for i, present in enumerate(twin.present):
            count = cosine(step, 90, 0.4, int(present.sum()))
            dropped = lowest(twin.pool(twin.weights[i].abs()), present, count)
            free = ~present | dropped if regrow_dropped else ~present
            grown = largest(twin.pool(twin.dense[i].abs()), free, count)
            twin.rewire(i, (present & ~dropped) | grown)

    compare(
        lambda model, optimizer: ds.RigL(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, drop_fraction=0.4,
            regrow_dropped=regrow_dropped,
        ),
        rule, b=b, adam=adam, updates=4,
    )  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("regrow_dropped", [False, True])
@pytest.mark.parametrize("b", [1, 2])
def test_rigl_with_a_global_budget(b, regrow_dropped):
    replaced = []

    def rule(step, twin, layers, trainer):
        if not due(step):
            return
        count = cosine(step, 90, 0.4, sum(int(p.sum()) for p in twin.present))
        chosen = count_lowest(magnitudes(twin), twin.present, count)
        for i, (present, dropped) in enumerate(zip(twin.present, chosen, strict=True)):
            free = ~present | dropped if regrow_dropped else ~present
            grown = largest(twin.pool(twin.dense[i].abs()), free, int(dropped.sum()))
            replaced.append(int(dropped.sum()) / int(present.sum()))
            twin.rewire(i, (present & ~dropped) | grown)

    compare(
        lambda model, optimizer: ds.RigL(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, drop_fraction=0.4,
            budget="global", regrow_dropped=regrow_dropped,
        ),
        rule, b=b, updates=4,
    )  # fmt: skip
    assert max(replaced[:3]) > 1.1 * min(replaced[:3])  # the layers differ


@pytest.mark.parametrize("b", [1, 2])
def test_rigl_with_gradient_starts(b):
    def rule(step, twin, layers, trainer):
        if not due(step):
            return
        for i, present in enumerate(twin.present):
            count = cosine(step, 90, 0.4, int(present.sum()))
            dropped = lowest(twin.pool(twin.weights[i].abs()), present, count)
            grown = largest(twin.pool(twin.dense[i].abs()), ~present, count)
            twin.rewire(i, (present & ~dropped) | grown, start=-2 * RATE * twin.dense[i])

    compare(
        lambda model, optimizer: ds.RigL(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, drop_fraction=0.4,
            initial_value=GradientStep(2.0),
        ),
        rule, b=b, updates=4,
    )  # fmt: skip


@pytest.mark.parametrize("b", [1, 2])
def test_set(b):
    def rule(step, twin, layers, trainer):
        if not due(step):
            return
        for i, layer in enumerate(layers):
            present = twin.present[i]
            count = cosine(step, 90, 0.4, int(present.sum()))
            dropped = lowest(twin.pool(twin.weights[i].abs()), present, count)
            twin.rewire(i, (present & ~dropped) | adopt(layer, twin, i, count, present))

    compare(
        lambda model, optimizer: ds.SET(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, drop_fraction=0.4, seed=1
        ),
        rule, b=b, updates=4,
    )  # fmt: skip


def test_static():
    compare(ds.Static, lambda *_: None, updates=0)
