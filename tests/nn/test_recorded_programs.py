"""Programs recorded by torch.fx and torch.jit: what works, raises, or is not converted."""

import warnings

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import dynsparse as ds


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (lambda: ds.nn.SparseLinear(16, 8, 0.3), torch.randn(2, 16)),
        (lambda: ds.nn.SparseConv2d(3, 8, 3, density=0.3), torch.randn(2, 3, 8, 8)),
        (lambda: ds.nn.SparseConv1d(3, 8, 3, density=0.3), torch.randn(2, 3, 8)),
        (lambda: ds.nn.SparseEmbedding(10, 8, 0.5), torch.tensor([1, 2])),
        (lambda: ds.nn.SparseTransformerLayer(16, 2, 32, density=0.5), torch.randn(2, 5, 16)),
    ],
)
def test_traced_programs_equal_the_model(layer, x):
    model = nn.Sequential(layer(), nn.ReLU()).eval()
    traced = symbolic_trace(model)
    assert torch.equal(traced(x), model(x))


def test_traced_programs_follow_the_pattern():
    model = nn.Sequential(ds.nn.SparseLinear(16, 8, 0.3))
    traced = symbolic_trace(model)
    x = torch.randn(4, 16)
    pattern = ds.SparsePattern.random((8, 16), 0.3)
    model[0].set_pattern(pattern, torch.ones(pattern.nnz))
    assert torch.equal(traced(x), model(x))
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]


def test_torch_jit():
    model, x = nn.Sequential(ds.nn.SparseLinear(16, 8, 0.3)), torch.randn(2, 16)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script does not compile .*: use"):
        torch.jit.script(model)
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    assert torch.equal(torch.jit.trace(model, x, check_trace=False)(x), model(x))


def test_quantize_dynamic_skips_sparse_layers():
    model = nn.Sequential(ds.nn.SparseLinear(16, 8, 0.3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert quantized[0].values.dtype == torch.float32
