"""The check of Nerva's results accepts correct ones and rejects wrong ones."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import nerva


class Network:
    """A torch model with the interface of Nerva; its gradients are multiplied by `factor`."""

    def __init__(self, factor=1.0):
        torch.manual_seed(0)
        shapes = [(12, 20), (9, 12), (4, 9)]
        self._weights = [torch.randn(shape) * (torch.rand(shape) < 0.3) for shape in shapes]
        self._biases = [torch.randn(1, shape[0]) for shape in shapes]
        self._factor = factor

    def weights(self):
        return [weight.numpy().copy() for weight in self._weights]

    def bias(self):
        return [bias.numpy() for bias in self._biases]

    def feedforward(self, x):
        self._held = [weight.clone().requires_grad_() for weight in self._weights]
        y = torch.from_numpy(x)
        for i, (weight, bias) in enumerate(zip(self._held, self._biases, strict=True)):
            y = y @ weight.t() + bias
            y = y.relu() if i < 2 else y
        self._y = y
        return y.detach().numpy()

    def backpropagate(self, y, dy):
        self._gradients = torch.autograd.grad(self._y, self._held, torch.from_numpy(dy))

    def optimize(self, rate):
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight -= rate * self._factor * gradient * (weight != 0)


@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 0.0, 1e-5), (1.1, 0.05, 0.2)])
def test_error_of_a_network(factor, least, most):
    x = np.random.default_rng(0).standard_normal((7, 20), np.float32)
    assert least <= nerva.error_of(Network(factor), x) <= most


def test_sparse_and_dense_torch_networks_are_equal(monkeypatch):
    monkeypatch.setattr(nerva, "SIZES", (24, 16, 16, 10))
    for densities in ([0.2, 0.3, 1.0], [1.0, 1.0, 1.0]):
        nerva.torch_step(densities)()
