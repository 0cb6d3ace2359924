"""Every algorithm equals, step by step, the same training with masked dense weights.

The masked twin knows nothing of the library: dense weights, dense gradients, masks, the optimizers
and each algorithm's rule are written here once more. Only positions that are drawn at random are
taken over from the sparse training, after a look whether they were free.
"""

import math

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import GradientStep

STEPS, INTERVAL = 120, 20
SIZES = [(24, 40), (40, 30), (30, 6)]  # (in, out)
RATE = 0.05


class Twin:
    """The masked dense training. `present` and `used` are per block; `used` is Top-KAST's A."""

    def __init__(self, layers, adam):
        self.b = layers[0].block_size
        self.weights = [layer.to_dense().detach().clone() for layer in layers]
        self.biases = [layer.bias.detach().clone() for layer in layers]
        self.present = [self.pool(layer.pattern.to_mask().double()) > 0 for layer in layers]
        self.used = [None] * len(layers)
        self.adam, self.time = adam, 0
        self.first = [torch.zeros_like(t) for t in self.weights + self.biases]
        self.second = [torch.zeros_like(t) for t in self.weights + self.biases]
        self.penalty = lambda index, weight: 0.0

    def pool(self, matrix):
        height, width = matrix.shape
        return matrix.view(height // self.b, self.b, width // self.b, self.b).sum((1, 3))

    def spread(self, blocks):
        return blocks.repeat_interleave(self.b, 0).repeat_interleave(self.b, 1)

    def mask(self, i):
        return self.spread(self.present[i]).double()

    def active(self, i):
        return self.mask(i) if self.used[i] is None else self.spread(self.used[i]).double()

    def step(self, x, target):
        count = len(self.weights)
        inputs, outputs = [x], []
        for i in range(count):
            outputs.append(inputs[-1] @ (self.weights[i] * self.active(i)).t() + self.biases[i])
            inputs.append(outputs[-1].relu())
        delta = (outputs[-1].softmax(1) - nn.functional.one_hot(target, 6)) / len(x)
        self.dense, bias_grads = [None] * count, [None] * count
        for i in reversed(range(count)):
            self.dense[i], bias_grads[i] = delta.t() @ inputs[i], delta.sum(0)
            if i:
                delta = (delta @ (self.weights[i] * self.active(i))) * (outputs[i - 1] > 0)
        self.grads = [g * self.mask(i) for i, g in enumerate(self.dense)]
        grads = [g + self.penalty(i, self.weights[i]) for i, g in enumerate(self.grads)]
        self.time += 1
        tensors = self.weights + self.biases
        for p, g, m, v in zip(tensors, grads + bias_grads, self.first, self.second, strict=True):
            if self.adam:
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                mean = m / (1 - 0.9**self.time)
                p -= RATE * mean / ((v / (1 - 0.999**self.time)).sqrt() + 1e-8)
            else:
                m.mul_(0.9).add_(g)
                p -= RATE * m
        for i, w in enumerate(self.weights):
            w *= self.mask(i)  # Adam divides zero by a small number: no weight leaves its mask

    def rewire(self, i, after, start=None):
        """Survivors keep weight and state; grown blocks begin at `start` [out, in] or zero."""
        survivors = self.spread(self.present[i] & after).double()
        grown = self.spread(after & ~self.present[i])
        for tensor in (self.weights[i], self.first[i], self.second[i]):
            tensor *= survivors
        if start is not None:
            self.weights[i][grown] = start[grown]
        self.present[i] = after


def lowest(score, present, count):
    """The `count` present blocks of lowest score: bool [h, w]."""
    chosen = torch.zeros(score.numel(), dtype=torch.bool)
    ranked = score.masked_fill(~present, math.inf).flatten().sort(stable=True).indices
    chosen[ranked[:count]] = True
    return chosen.view(score.shape)


def largest(score, allowed, count):
    return lowest(-score, allowed, count)


def cosine(step, end, fraction, blocks):
    return math.floor(fraction / 2 * (1 + math.cos(math.pi * step / end)) * blocks)


def magnitudes(twin):
    return [twin.pool(w.abs()) for w in twin.weights]


def lowest_of_all(scores, present, count, keep=0):
    """The lowest scores of all layers together, by one sort of (score, layer, position)."""
    every = sorted(
        (float(s), i, p)
        for i, (score, there) in enumerate(zip(scores, present, strict=True))
        for p, (s, on) in enumerate(zip(score.flatten(), there.flatten(), strict=True))
        if on
    )
    left = [int(p.sum()) for p in present]
    chosen = [torch.zeros(p.numel(), dtype=torch.bool) for p in present]
    for _, i, position in every:
        if count and left[i] > keep:
            chosen[i][position] = True
            left[i] -= 1
            count -= 1
    return [c.view(p.shape) for c, p in zip(chosen, present, strict=True)]


def adopt(layer, twin, i, count, taken):
    """The grown positions of the sparse layer: as many as they should be, and free before."""
    now = twin.pool(layer.pattern.to_mask().double()) > 0
    grown = now & ~taken
    assert int(grown.sum()) == count
    return grown


def make_layers(b, density=0.25):
    g = torch.Generator().manual_seed(0)
    return [
        SparseLinear(i, o, density=density, block_size=b, generator=g, dtype=torch.float64)
        for i, o in SIZES
    ]


def compare(make, rule, *, b=1, density=0.25, adam=False, updates, prepare=None):
    """Train both; `rule(step, twin, layers, trainer)` rewires the twin after each step."""
    layers = make_layers(b, density)
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    parameters = [id(p) for p in model.parameters()]
    twin = Twin(layers, adam)
    trainer = make(model, optimizer)
    if prepare:
        prepare(twin, layers, trainer)
    data = torch.Generator().manual_seed(1)
    made = 0
    for step in range(1, STEPS + 1):
        x = torch.randn(16, 24, generator=data, dtype=torch.float64)
        target = torch.randint(6, (16,), generator=data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        made += trainer.step() is not None
        twin.step(x, target)
        rule(step, twin, layers, trainer)
        for i, layer in enumerate(layers):
            assert torch.equal(layer.pattern.to_mask(), twin.mask(i) > 0), f"layer {i}, {step}"
            assert layer.values.shape == layer.pattern.values_shape
            worst = float((layer.to_dense().detach() - twin.weights[i]).abs().max())
            assert worst < 1e-10, f"layer {i} differs by {worst} at step {step}"
            for state in optimizer.state[layer.values].values():
                assert state.dim() == 0 or len(state) == layer.pattern.nnz
    # The last updates may be too small for a whole block.
    assert updates - 1 <= made <= updates
    assert [id(p) for p in model.parameters()] == parameters
    return trainer, twin


def due(step, end=0.75 * STEPS):
    return step % INTERVAL == 0 and step < end


def share(total, weights, most):
    """In proportion to `weights`; what a full layer cannot take is shared among the others."""
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


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("regrow_dropped", [False, True])
@pytest.mark.parametrize("window", [7, 50, None])
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


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("b", [1, 2])
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


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("b", [1, 2])
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
        for i, dropped in enumerate(lowest_of_all(magnitudes(twin), twin.present, count, keep=1)):
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
            chosen = lowest_of_all(magnitudes(twin), twin.present, count, keep=1)
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


@pytest.mark.parametrize("regrow_dropped", [False, True])
@pytest.mark.parametrize("b", [1, 2])
def test_rigl_with_a_global_budget(b, regrow_dropped):
    replaced = []

    def rule(step, twin, layers, trainer):
        if not due(step):
            return
        count = cosine(step, 90, 0.4, sum(int(p.sum()) for p in twin.present))
        chosen = lowest_of_all(magnitudes(twin), twin.present, count)
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
