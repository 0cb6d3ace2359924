"""What a layer prepares of its index follows whatever happens to its tensors."""

import copy
import pickle

import pytest
import torch
from torch.nn.functional import linear as dense_linear

from dynsparse import SparsePattern
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import linear


def computes(layer, x=None):
    x = torch.randn(3, layer.in_features, dtype=layer.values.dtype) if x is None else x
    torch.testing.assert_close(
        layer(x), dense_linear(x, layer.to_dense(), layer.bias), rtol=1e-4, atol=1e-4
    )


@pytest.fixture
def layer():
    made = SparseLinear(24, 16, 0.3)
    computes(made)
    assert made._layer_index is not None
    return made


def test_it_is_made_once(layer):
    before = layer._layer_index
    computes(layer)
    assert layer._layer_index is before


def test_copies_do_not_share_it(layer):
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        assert other._layer_index is None or other._layer_index.holds(other._buffers)
        computes(other)
        other.set_pattern(SparsePattern.random((16, 24), nnz=layer.pattern.nnz))
        computes(other)
    assert "_layer_index" not in layer.__getstate__()


def test_it_follows_a_new_pattern_dtype_and_state(layer):
    layer.set_pattern(SparsePattern.random((16, 24), nnz=layer.pattern.nnz))
    computes(layer)
    layer.double()
    computes(layer)
    layer.float()
    computes(layer)
    other = SparseLinear(24, 16, 0.3)
    layer.load_state_dict(other.state_dict())
    x = torch.randn(2, 24)
    assert torch.equal(layer(x), other(x))


def test_it_follows_memory_that_moves(layer):
    layer.share_memory()
    computes(layer)
    for name in ("row_ptr", "cols", "col_ptr", "csc_rows", "csc_perm"):
        setattr(layer, name, getattr(layer, name).clone())
    computes(layer)


def test_it_follows_functional_calls(layer):
    other = SparseLinear(24, 16, 0.3)
    x = torch.randn(2, 24)
    state = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(torch.func.functional_call(layer, state, (x,)), other(x))
    computes(layer)


def test_a_moved_layer_says_what_does_not_fit(layer):
    moved = copy.deepcopy(layer).to("meta")
    assert moved(torch.randn(2, 24, device="meta")).shape == (2, 16)
    with pytest.raises(RuntimeError, match="x is on meta but the layer's values are on cpu"):
        layer(torch.randn(2, 24, device="meta"))
    layer.cols = layer.cols[:-1]
    with pytest.raises(RuntimeError, match=r"values hold .* blocks but the pattern has"):
        layer(torch.randn(2, 24))


def test_values_that_were_resized_before_backward(layer):
    y = layer(torch.randn(2, 24))
    layer.resizable = True
    layer.set_pattern(SparsePattern.random((16, 24), nnz=10))
    with pytest.raises(RuntimeError, match="call backward before the layer is resized"):
        y.sum().backward()
    computes(layer)


def test_values_of_another_shape_are_refused(layer):
    wrong = layer.values.detach()[:-1]
    with pytest.raises(RuntimeError, match="values hold"):
        linear(torch.randn(2, 24), wrong, layer._layer_index)
    with pytest.raises(RuntimeError, match="values must have the shape"):
        linear(torch.randn(2, 24), layer.values.detach().view(-1, 1, 1), layer._layer_index)
