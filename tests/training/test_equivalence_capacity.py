"""Algorithms that change the capacity equal masked dense trainings, step by step."""

import math

import pytest
from masked_twins import (
    INTERVAL,
    SIZES,
    STEPS,
    adopt,
    compare,
    cosine,
    count_lowest,
    due,
    largest,
    lowest,
    magnitudes,
    make_layers,
)

import dynsparse as ds


def share(total, weights, most):
    """Share `total` in proportion to `weights`; the excess of full layers goes to the others."""
    quota = [total * w / sum(weights) for w in weights]
    full = [q >= m for q, m in zip(quota, most, strict=True)]
    if any(full):
        left = total - sum(m for m, f in zip(most, full, strict=True) if f)
        rest = share(left, [0 if f else w for w, f in zip(weights, full, strict=True)],
                     [math.inf if f else m for m, f in zip(most, full, strict=True)])  # fmt: skip
        return [m if f else r for m, f, r in zip(most, full, rest, strict=True)]
    whole = [math.floor(q) for q in quota]
    order = sorted(range(len(weights)), key=lambda i: whole[i] - quota[i])
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


@pytest.mark.parametrize("b", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("regrow_dropped", [False, True])
@pytest.mark.parametrize(
    "window",
    [pytest.param(7, marks=pytest.mark.slow), 50, pytest.param(None, marks=pytest.mark.slow)],
)
def test_snfs(window, regrow_dropped, b):
    seen, filled = [], []

    def rule(step, twin, layers, trainer):
        seen.append(twin.dense)
        if not due(step):
            return
        steps = seen if window is None else seen[-window:]
        momentum = [
            sum(0.9 ** (len(steps) - 1 - k) * dense[i] for k, dense in enumerate(steps))
            for i in range(3)
        ]
        count = [cosine(step, 90, 0.4, int(p.sum())) for p in twin.present]
        mean = [float(m[twin.mask(i) > 0].abs().mean()) for i, m in enumerate(momentum)]
        room = [
            int((~p).sum()) + regrow_dropped * c for p, c in zip(twin.present, count, strict=True)
        ]
        whole = share(sum(count), mean, room)
        filled.append(any(w == r for w, r in zip(whole, room, strict=True)))
        for i in range(3):
            present = twin.present[i]
            dropped = lowest(twin.pool(twin.weights[i].abs()), present, count[i])
            free = ~present | dropped if regrow_dropped else ~present
            grown = largest(twin.pool(momentum[i].abs()), free, whole[i])
            twin.rewire(i, (present & ~dropped) | grown)

    _, twin = compare(
        lambda model, optimizer: ds.SNFS(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, drop_fraction=0.4,
            window=window, regrow_dropped=regrow_dropped,
        ),
        rule, b=b, updates=4,
    )  # fmt: skip
    blocks = [int(p.sum()) for p in twin.present]
    assert sum(blocks) == sum(layer.pattern.nnz for layer in make_layers(b))
    assert blocks != [layer.pattern.nnz for layer in make_layers(b)]
    assert any(filled)  # the small last layer has the largest momentum


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("b", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mest_with_a_soft_memory_bound(b, adam):
    base = [layer.pattern.nnz for layer in make_layers(b)]

    def rule(step, twin, layers, trainer):
        if not due(step) and step != 90:
            return
        for i, layer in enumerate(layers):
            present = twin.present[i]
            extra = int(present.sum()) - base[i]
            count = cosine(step, 90, 0.4, base[i]) if step < 90 else 0
            score = twin.pool(twin.weights[i].abs() + 0.5 * twin.grads[i].abs())
            dropped = lowest(score, present, extra)
            twin.rewire(i, (present & ~dropped) | adopt(layer, twin, i, count, present))

    _, twin = compare(
        lambda model, optimizer: ds.MEST(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, drop_fraction=0.4,
            gradient_weight=0.5, soft_memory_bound=True, seed=3,
        ),
        rule, b=b, adam=adam, updates=5,
    )  # fmt: skip
    assert [int(p.sum()) for p in twin.present] == base


def cubic(step, start, end):
    return (1 - min(max((step - start) / (end - start), 0), 1)) ** 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("b", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_gmp_from_dense(scope, b, adam):
    total = [o * i // b**2 for i, o in SIZES]
    final = [round(0.1 * t) for t in total]
    sizes = []

    def rule(step, twin, layers, trainer):
        # Begins after step 12, ends at step 90: multiples of 20, and the end itself.
        if not (12 < step <= 90 and (step % INTERVAL == 0 or step == 90)):
            return
        left = cubic(step, 12, 90)
        sizes.append([int(p.sum()) for p in twin.present])
        if scope == "layer":
            for i, present in enumerate(twin.present):
                target = final[i] + round((total[i] - final[i]) * left)
                count = int(present.sum()) - target
                dropped = lowest(twin.pool(twin.weights[i].abs()), present, count)
                twin.rewire(i, present & ~dropped)
            return
        target = sum(final) + round((sum(total) - sum(final)) * left)
        count = sum(sizes[-1]) - target
        for i, dropped in enumerate(count_lowest(magnitudes(twin), twin.present, count, keep=1)):
            twin.rewire(i, twin.present[i] & ~dropped)

    _, twin = compare(
        lambda model, optimizer: ds.GMP(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, final_density=0.1,
            start_fraction=0.1, end_fraction=0.75, scope=scope,
        ),
        rule, b=b, density=1.0, adam=adam, updates=5,
    )  # fmt: skip
    blocks = [int(p.sum()) for p in twin.present]
    assert sum(blocks) == sum(final)
    assert (blocks == final) == (scope == "layer")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("regrow_dropped", [False, True])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_granet(scope, regrow_dropped, density):
    first = [layer.pattern.nnz for layer in make_layers(1, density)]
    final = [round(0.1 * o * i) for i, o in SIZES]

    def rule(step, twin, layers, trainer):
        # The last pruning is at step 90, which is no multiple of 20.
        if step == STEPS or (step % INTERVAL and step != 90):
            return
        left = cubic(step, 0, 90)
        now = [int(p.sum()) for p in twin.present]
        if scope == "layer":
            target = [f + round((s - f) * left) for f, s in zip(final, first, strict=True)]
            pruned = [n - t for n, t in zip(now, target, strict=True)]
        else:
            count = sum(now) - sum(final) - round((sum(first) - sum(final)) * left)
            chosen = count_lowest(magnitudes(twin), twin.present, count, keep=1)
            pruned = [int(c.sum()) for c in chosen]
        for i, present in enumerate(twin.present):
            replaced = cosine(step, STEPS, 0.5, now[i] - pruned[i])
            if not regrow_dropped:
                replaced = min(replaced, int((~present).sum()))
            dropped = lowest(twin.pool(twin.weights[i].abs()), present, pruned[i] + replaced)
            free = ~present | dropped if regrow_dropped else ~present
            grown = largest(twin.pool(twin.dense[i].abs()), free, replaced)
            twin.rewire(i, (present & ~dropped) | grown)

    _, twin = compare(
        lambda model, optimizer: ds.GraNet(
            model, optimizer, total_steps=STEPS, update_interval=INTERVAL, final_density=0.1,
            scope=scope, regrow_dropped=regrow_dropped,
        ),
        rule, density=density, updates=6,
    )  # fmt: skip
    assert sum(int(p.sum()) for p in twin.present) == sum(final)
