"""Several threads use one layer while one of them may change its pattern."""

import sys
import threading

import pytest
import torch
from torch.nn.functional import linear as dense_linear

from dynsparse import SparsePattern, ops
from dynsparse.nn import SparseEmbedding, SparseLinear
from dynsparse.pattern import Rewiring


@pytest.fixture(autouse=True)
def often():
    """Switch threads a thousand times as often as by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def run_in_threads(work, count=8):
    """Run work(i) in `count` threads that start together; raise the first error."""
    barrier, errors = threading.Barrier(count), []

    def run(i):
        barrier.wait()
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def assert_each_near_one(seen, answers):
    """Check that each tensor in `seen` is close to one of `answers`."""
    far = torch.cdist(torch.stack(seen).flatten(1), torch.stack(answers).flatten(1), torch.inf)
    assert float(far.min(1).values.max()) < 1e-4


@pytest.mark.parametrize("kind", ["sparse", "small", "dense"])
@pytest.mark.parametrize("batch", [1, 200])
def test_concurrent_first_calls(kind, batch):
    x = torch.randn(batch, 300)
    for _ in range(20):
        layer = SparseLinear(300, 200, 0.4)
        expected = dense_linear(x, layer.to_dense(), layer.bias).detach()

        def work(i, layer=layer, expected=expected):
            with torch.no_grad():
                torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)

        with ops.use_kernel(kind):
            run_in_threads(work)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("resizable", [False, True])
def test_concurrent_forward_sees_a_consistent_layer(block_size, resizable):
    """With 8 threads and 100 updates, each output belongs to one of the patterns."""
    layer = SparseLinear(96, 64, 0.3, block_size, bias=False)
    layer.resizable = resizable
    x = torch.randn(3, 96)
    answers = [dense_linear(x, layer.to_dense()).detach()]
    done = threading.Event()

    def read():
        seen = []
        while not done.is_set() or not seen:
            with torch.no_grad():
                seen.append(layer(x))
        assert_each_near_one(seen, answers)

    def change():
        for i in range(100):
            nnz = layer.pattern.nnz + (i % 2 * 2 - 1 if resizable else 0)
            after = SparsePattern.random((64, 96), nnz=nnz, block_size=block_size)
            values = torch.randn(after.values_shape)
            if i % 3:
                answers.append(dense_linear(x, after.to_dense(values)))
                layer.set_pattern(after, values)
            else:
                rewiring = Rewiring.between(layer.pattern, after)
                moved = rewiring.apply(layer.values.detach(), 0.5)
                answers.append(dense_linear(x, after.to_dense(moved)))
                layer.rewire(rewiring, 0.5)
        done.set()

    run_in_threads(lambda i: change() if i == 0 else read())


def test_concurrent_forward_and_backward():
    layer = SparseLinear(64, 48, 0.3)
    inputs = [torch.randn(5 + i, 64) for i in range(8)]
    expected = []
    for x in inputs:
        leaf = x.clone().requires_grad_()
        expected.append(torch.autograd.grad(layer(leaf).square().sum(), [leaf, layer.values]))

    def work(i):
        for _ in range(50):
            leaf = inputs[i].clone().requires_grad_()
            got = torch.autograd.grad(layer(leaf).square().sum(), [leaf, layer.values])
            for one, other in zip(got, expected[i], strict=True):
                torch.testing.assert_close(one, other)

    run_in_threads(work)


def test_embedding_is_read_while_it_changes():
    table = SparseEmbedding(40, 16, 0.4)
    ids = torch.arange(40)
    answers = [table.to_dense().detach()]
    done = threading.Event()

    def read():
        seen = []
        while not done.is_set() or not seen:
            with torch.no_grad():
                seen.append(table(ids))
        assert_each_near_one(seen, answers)

    def change():
        for _ in range(100):
            after = SparsePattern.random((40, 16), nnz=table.pattern.nnz)
            values = torch.randn(after.nnz)
            answers.append(after.to_dense(values))
            table.set_pattern(after, values)
        done.set()

    run_in_threads(lambda i: change() if i == 0 else read(), 4)
