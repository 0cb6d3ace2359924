"""Masked dense reference trainings that repeat each algorithm step by step.

The reference does not use the library: dense weights, dense gradients, masks, the optimizers and
each algorithm's rule are implemented here again. Only random positions are taken from the sparse
training, after checking that they were free.
"""

import math

import torch
from torch import nn

from dynsparse.nn import SparseLinear

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
        """Kept blocks keep weight and state; grown blocks start at `start` [out, in] or zero."""
        survivors = self.spread(self.present[i] & after).double()
        grown = self.spread(after & ~self.present[i])
        for tensor in (self.weights[i], self.first[i], self.second[i]):
            tensor *= survivors
        if start is not None:
            self.weights[i][grown] = start[grown]
        self.present[i] = after


def lowest(score, present, count):
    """Select the `count` present blocks of lowest score: bool [h, w]."""
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


def count_lowest(scores, present, count, keep=0):
    """Select the lowest scores over all layers, by one sort of (score, layer, position)."""
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
    """Take the grown positions of the sparse layer; check their number and that they were free."""
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
    """Train both and compare them; `rule(step, twin, layers, trainer)` rewires the twin."""
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
