"""A sparse training equals, step by step, the same training with masked dense weights.

The masked twin is written here once more with plain torch: dense weights, dense gradients, masks,
and optimizers by hand, so that nothing of the library can hide in it.
"""

import math

import pytest
import torch
from torch import nn

from dynsparse.nn import SparseLinear
from dynsparse.training import CosineSchedule, RigL

STEPS, INTERVAL, FRACTION = 200, 40, 0.4
SIZES = [(24, 40), (40, 30), (30, 6)]  # (in, out)


class Momentum:
    def __init__(self, tensors):
        self.velocity = [torch.zeros_like(t) for t in tensors]

    def step(self, tensors, grads):
        for t, g, v in zip(tensors, grads, self.velocity, strict=True):
            v.mul_(0.9).add_(g)
            t -= 0.05 * v

    def states(self, index):
        return [self.velocity[index]]


class Adam:
    def __init__(self, tensors):
        self.first = [torch.zeros_like(t) for t in tensors]
        self.second = [torch.zeros_like(t) for t in tensors]
        self.t = 0

    def step(self, tensors, grads):
        self.t += 1
        for p, g, m, v in zip(tensors, grads, self.first, self.second, strict=True):
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            p -= 0.01 * (m / (1 - 0.9**self.t)) / ((v / (1 - 0.999**self.t)).sqrt() + 1e-8)

    def states(self, index):
        return [self.first[index], self.second[index]]


def block_sums(matrix, b):
    height, width = matrix.shape
    return matrix.view(height // b, b, width // b, b).sum((1, 3))


def masked_training(weights, biases, masks, batches, optimizer, b, regrow_dropped):
    """Yields (masks, weights) after every step."""
    count = len(weights)
    for step, (x, target) in enumerate(batches, 1):
        inputs, outputs = [x], []
        for i in range(count):
            outputs.append(inputs[-1] @ (weights[i] * masks[i]).t() + biases[i])
            inputs.append(outputs[-1].relu())
        # Softmax cross-entropy, then back through the layers.
        delta = (outputs[-1].softmax(1) - nn.functional.one_hot(target, 6)) / len(x)
        dense = [torch.empty(0)] * count
        bias_grads = [torch.empty(0)] * count
        for i in reversed(range(count)):
            dense[i], bias_grads[i] = delta.t() @ inputs[i], delta.sum(0)
            if i:
                delta = (delta @ (weights[i] * masks[i])) * (outputs[i - 1] > 0)
        optimizer.step(
            weights + biases, [d * m for d, m in zip(dense, masks, strict=True)] + bias_grads
        )
        for w, m in zip(weights, masks, strict=True):
            w *= m
        if step % INTERVAL == 0 and step < STEPS:
            share = FRACTION / 2 * (1 + math.cos(math.pi * step / STEPS))
            for i in range(count):
                rewire_masked(weights[i], masks, i, dense[i], share, optimizer, b, regrow_dropped)
        yield [m.clone() for m in masks], [w.clone() for w in weights]


def rewire_masked(weight, masks, i, grad, share, optimizer, b, regrow_dropped):
    present = block_sums(masks[i].double(), b).flatten() > 0
    k = math.floor(share * int(present.sum()))
    score = block_sums(weight.abs(), b).flatten()
    score[~present] = math.inf
    dropped = score.sort(stable=True).indices[:k]
    kept = present.clone()
    kept[dropped] = False
    gain = block_sums(grad.abs(), b).flatten()
    gain[kept if regrow_dropped else present] = -1
    grown = gain.sort(descending=True, stable=True).indices[:k]
    after = kept.clone()
    after[grown] = True
    width = masks[i].shape[1] // b

    def element(blocks):
        return blocks.view(-1, width).repeat_interleave(b, 0).repeat_interleave(b, 1)

    survivors = element(present & after).to(weight.dtype)
    weight *= survivors
    for state in optimizer.states(i):
        state *= survivors
    masks[i] = element(after).to(weight.dtype)


@pytest.mark.parametrize("regrow_dropped", [False, True])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_200_steps_with_4_updates(kind, b, regrow_dropped, generator):
    layers = [
        SparseLinear(i, o, density=0.25, block_size=b, generator=generator, dtype=torch.float64)
        for i, o in SIZES
    ]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    weights = [layer.to_dense().detach().clone() for layer in layers]
    biases = [layer.bias.detach().clone() for layer in layers]
    masks = [layer.pattern.to_mask().double() for layer in layers]
    batches = [
        (
            torch.randn(32, 24, generator=generator, dtype=torch.float64),
            torch.randint(6, (32,), generator=generator),
        )
        for _ in range(STEPS)
    ]
    if kind == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        twin = Adam(weights + biases)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        twin = Momentum(weights + biases)
    trainer = RigL(
        model,
        optimizer,
        schedule=CosineSchedule(STEPS, INTERVAL, FRACTION, end_fraction=1.0),
        regrow_dropped=regrow_dropped,
    )
    updates, worst = [], 0.0
    masked = masked_training(weights, biases, masks, batches, twin, b, regrow_dropped)
    for step, ((x, target), (twin_masks, twin_weights)) in enumerate(
        zip(batches, masked, strict=True), 1
    ):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        if trainer.step() is not None:
            updates.append(step)
        for layer, mask, weight in zip(layers, twin_masks, twin_weights, strict=True):
            assert torch.equal(layer.pattern.to_mask(), mask > 0), f"patterns differ at {step}"
            worst = max(worst, float((layer.to_dense().detach() - weight).abs().max()))
        assert worst < 1e-10
    assert updates == [40, 80, 120, 160]
