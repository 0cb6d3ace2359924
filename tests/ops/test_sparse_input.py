"""Sparse inputs equal the same inputs in dense form: forward, backward and growth."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dynsparse as ds
from dynsparse._core import native
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import sparse_input

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")


@pytest.fixture(scope="module", autouse=True)
def _any_share():
    """The kernels for sparse inputs compute all of them, also those that others do faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_input, "_LARGEST_SHARE", 1.0)
        yield


def sparse(dense, layout="csr"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()


def random_input(batch, features, share, generator):
    x = torch.randn(batch, features, generator=generator)
    return x * (torch.rand(batch, features, generator=generator) < share)


def gradients(layer, x, dy):
    return torch.autograd.grad(layer(x), list(layer.parameters()), dy)


@given(
    block=st.sampled_from([1, 2, 4, 16]),
    size=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    batch=st.integers(0, 9),
    share=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    density=st.floats(0.05, 1.0),
    bias=st.booleans(),
    layout=st.sampled_from(["csr", "coo"]),
    seed=st.integers(0, 2**31),
)
def test_equals_float64(block, size, batch, share, density, bias, layout, seed):
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = (n * block for n in size)
    layer = SparseLinear(
        in_features, out_features, density=density, block_size=block, bias=bias, generator=generator
    )
    x = random_input(batch, in_features, share, generator)
    dy = torch.randn(batch, out_features, generator=generator)
    y = layer(sparse(x, layout))
    weight = layer.to_dense().detach().double()
    expected = x.double() @ weight.t() + (layer.bias.detach().double() if bias else 0)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    dvalues, *dbias = gradients(layer, sparse(x, layout), dy)
    expected = layer.pattern.values_of(dy.double().t() @ x.double())
    torch.testing.assert_close(dvalues.double(), expected, rtol=1e-5, atol=1e-5)
    if bias:
        torch.testing.assert_close(dbias[0], dy.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(native.load() is None, reason="needs the compiled kernels")
def test_input_is_densified_above_a_density(monkeypatch):
    layer = SparseLinear(64, 16, density=0.2)
    x = sparse(torch.eye(8, 64))
    monkeypatch.setattr(sparse_input, "layer_linear", None)
    layer(x).sum().backward()
    monkeypatch.setattr(sparse_input, "_LARGEST_SHARE", 1 / 65)
    with pytest.raises(TypeError, match="not callable"):
        layer(x)


@pytest.mark.parametrize("case", ["float64", "autocast", "frozen", "gradient of the input"])
def test_unsupported_inputs_are_densified(case):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if case == "float64" else torch.float32
    layer = SparseLinear(32, 8, density=0.3, dtype=dtype)
    dense = random_input(6, 32, 0.2, generator).to(dtype)
    x = sparse(dense)
    if case == "gradient of the input":
        x.requires_grad_()
        dense.requires_grad_()
        layer(dense).sum().backward()
        layer(x).sum().backward()
        torch.testing.assert_close(x.grad.to_dense(), dense.grad * (dense != 0))
        return
    layer.requires_grad_(case != "frozen")
    with torch.autocast("cpu", enabled=case == "autocast"):
        torch.testing.assert_close(layer(x), layer(dense))


def test_rigl_training_equals_dense_inputs():
    generator = torch.Generator().manual_seed(0)
    models, trainers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(
            torch.nn.Sequential(SparseLinear(64, 16, density=0.1), torch.nn.Linear(16, 4))
        )
        optimizer = torch.optim.SGD(models[-1].parameters(), lr=0.1, momentum=0.9)
        trainers.append(ds.RigL(models[-1], optimizer, total_steps=40, update_interval=4))
    before = models[0][0].pattern
    for _ in range(20):
        x = random_input(32, 64, 0.2, generator)
        for model, trainer, given_x in zip(models, trainers, (x, sparse(x)), strict=True):
            trainer.optimizer.zero_grad()
            model(given_x).square().mean().backward()
            trainer.step()
    assert models[0][0].pattern == models[1][0].pattern != before
    torch.testing.assert_close(models[0][0].values, models[1][0].values)


def test_results_are_equal_for_any_number_of_threads():
    layer = SparseLinear(512, 128, density=0.2)
    x = sparse(random_input(64, 512, 0.2, torch.Generator()))
    dy = torch.randn(64, 128)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append([layer(x), *gradients(layer, x, dy)])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("largest_share", [0.0, 1.0])  # made dense, or read by the kernels
def test_bad_inputs(largest_share, monkeypatch):
    monkeypatch.setattr(sparse_input, "_LARGEST_SHARE", largest_share)
    layer = SparseLinear(8, 4, density=0.5)
    x = torch.ones(2, 8)
    with pytest.raises(TypeError, match=r"must be CSR or COO, got torch\.sparse_csc"):
        layer(x.to_sparse_csc())
    for shape in ((2, 6), (2, 2, 8)):
        with pytest.raises(ValueError, match=r"must be \[batch, 8\], got"):
            layer(torch.ones(shape).to_sparse())
    for column in (-1, 8, 2**32):
        indices = torch.tensor([[0], [column]])
        ones = torch.ones(1)
        x_coo = torch.sparse_coo_tensor(
            indices, ones, (1, 8), is_coalesced=True, check_invariants=False
        )
        x_csr = torch.sparse_csr_tensor(
            torch.tensor([0, 1]), indices[1], ones, (1, 8), check_invariants=False
        )
        for wrong in (x_coo, x_csr):
            with pytest.raises(IndexError, match=rf"columns .* must be in \[0, 8\), got {column}"):
                layer(wrong)
    pointers = torch.tensor([0, 2, 1])
    wrong = torch.sparse_csr_tensor(
        pointers, torch.tensor([0]), torch.ones(1), (2, 8), check_invariants=False
    )
    with pytest.raises(IndexError, match="row pointers of a sparse input must rise from 0"):
        layer(wrong)


def test_changed_weights_need_another_forward():
    layer = SparseLinear(8, 4, density=0.5)
    y = layer(sparse(torch.ones(2, 8)))
    with torch.no_grad():
        layer.values.mul_(2)
    with pytest.raises(RuntimeError, match="call backward before"):
        y.sum().backward()
