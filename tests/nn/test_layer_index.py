"""The index of a layer stays valid whatever happens to its tensors."""

import copy
import pickle

import pytest
import torch
from torch.nn.functional import linear as dense_linear

from dynsparse import SparsePattern
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import linear
from dynsparse.ops.linear.layer_index import TensorCache


def computes(layer, x=None):
    x = torch.randn(3, layer.in_features, dtype=layer.values.dtype) if x is None else x
    torch.testing.assert_close(
        layer(x), dense_linear(x, layer.to_dense(), layer.bias), rtol=1e-4, atol=1e-4
    )


@pytest.fixture
def layer():
    made = SparseLinear(24, 16, 0.3)
    computes(made)
    assert made._state is not None
    return made


def test_index_is_built_once(layer):
    before = layer._state
    computes(layer)
    layer(torch.randn(40, 24)).sum().backward()
    assert layer._state is before


def test_copies_do_not_share_the_index(layer):
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        assert other._state is not layer._state
        assert torch.equal(other.to_dense(), layer.to_dense())
        computes(other)
        pattern = layer.pattern
        other.set_pattern(SparsePattern.random((16, 24), nnz=pattern.nnz))
        computes(other)
        assert layer.pattern is pattern
    assert "_state" not in layer.__getstate__()


def test_index_follows_pattern_dtype_and_state(layer):
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


def test_index_follows_moved_memory(layer):
    layer.share_memory()
    computes(layer)
    layer.values.data = layer.values.data.clone()
    computes(layer)
    for name in ("rows", "cols"):
        setattr(layer, name, getattr(layer, name).clone())
    computes(layer)


def test_mismatched_devices_and_lengths_raise(layer):
    moved = copy.deepcopy(layer).to("meta")
    assert moved(torch.randn(2, 24, device="meta")).shape == (2, 16)
    with pytest.raises(RuntimeError, match="x is on meta but the layer's values are on cpu"):
        layer(torch.randn(2, 24, device="meta"))
    layer.cols = layer.cols[:-1]
    with pytest.raises(ValueError, match="rows and cols differ in length"):
        layer(torch.randn(2, 24))


def test_resizing_before_backward_raises(layer):
    y = layer(torch.randn(2, 24))
    layer.resizable = True
    layer.set_pattern(SparsePattern.random((16, 24), nnz=10))
    with pytest.raises(RuntimeError, match="call backward before the layer is resized"):
        y.sum().backward()
    computes(layer)


def test_values_of_another_shape_raise(layer):
    wrong = layer.values.detach()[:-1]
    with pytest.raises(RuntimeError, match="values hold"):
        linear(torch.randn(2, 24), wrong, layer._state.index)
    with pytest.raises(RuntimeError, match="values must have the shape"):
        linear(torch.randn(2, 24), layer.values.detach().view(-1, 1, 1), layer._state.index)


@pytest.mark.parametrize("name", ["cols", "row_ptr"])
def test_modified_index_raises(layer, name):
    getattr(layer.index, name)[0] = 1000
    if name == "cols":
        with pytest.raises(RuntimeError, match="the index of this layer was written to"):
            layer(torch.randn(2, 24))
    x, values = torch.randn(2, 24), layer.values.detach()
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match=r"must lie in|must ascend"),
    ):
        torch.ops.dynsparse.linear(x, values, *layer.index, None)


def test_state_dicts_share_no_memory_with_the_pattern(layer):
    before = copy.deepcopy(layer.pattern.rows), copy.deepcopy(layer.pattern.cols)
    state = layer.state_dict()
    assert list(state) == ["values", "bias", "rows", "cols"]
    state["rows"].zero_()
    state["cols"].zero_()
    assert torch.equal(layer.pattern.rows, before[0])
    assert torch.equal(layer.pattern.cols, before[1])
    computes(layer)
    assert not list(layer.buffers())


def test_functional_calls(layer):
    other, x = SparseLinear(24, 16, 0.3), torch.randn(2, 24)
    expected = other(x)
    for state in (other.state_dict(), other.state_dict(keep_vars=True)):
        assert torch.equal(torch.func.functional_call(layer, state, (x,)), expected)
        computes(layer)
    assert torch.equal(layer.rows, layer.pattern.rows)


def test_sharded_values_raise(layer, tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(layer.values.detach(), mesh, [Shard(0)])
        layer.values = torch.nn.Parameter(sharded)
        with pytest.raises(RuntimeError, match="are sharded"):
            layer(torch.randn(2, 24))
        with pytest.raises(RuntimeError, match="are sharded"):
            layer.set_pattern(SparsePattern.random((16, 24), nnz=layer.pattern.nnz))
    finally:
        dist.destroy_process_group()


def test_tensor_cache_holds_values_while_the_tensors_are_alive_and_unmodified():
    cache, first, second = TensorCache(), torch.zeros(3), torch.zeros(2)
    for value in (1, 2):
        cache.put((first, second), value)
        assert cache.get((first, second)) == value
    assert cache.get((first, torch.zeros(2))) is None
    second.add_(1)
    assert cache.get((first, second)) is None
    del first
    assert not cache._entries
