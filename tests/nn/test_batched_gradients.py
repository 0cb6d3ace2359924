"""Batched gradients: `is_grads_batched`, and `vectorize` of torch.autograd.functional."""

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from dynsparse.nn import SparseLinear

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's loop


@pytest.fixture(params=[(1, torch.float32), (4, torch.float32), (1, torch.float64)])
def layer(request):
    block_size, dtype = request.param
    return SparseLinear(16, 8, 0.3, block_size, dtype=dtype)


def test_batched_gradients_equal_single_ones(layer):
    x = torch.randn(2, 16, dtype=layer.values.dtype, requires_grad=True)
    inputs = [x, layer.values, layer.bias]
    y = layer(x)
    grads = torch.randn(5, *y.shape, dtype=y.dtype)
    batched = torch.autograd.grad(y, inputs, grads, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, inputs, grad, retain_graph=True) for grad in grads]
    for found, expected in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected))


def test_vectorized_derivatives(layer):
    x = torch.randn(2, 16, dtype=layer.values.dtype)

    def loss(x):
        return layer(x).pow(3).sum()

    for derivative, function in ((jacobian, layer), (hessian, loss)):
        torch.testing.assert_close(
            derivative(function, x, vectorize=True), derivative(function, x), rtol=1e-4, atol=1e-4
        )
