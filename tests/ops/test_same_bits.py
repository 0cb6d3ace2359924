"""The same bits from run to run and for any number of threads, but for what a BLAS computes."""

import pytest
import torch

import dynsparse as ds
from dynsparse.nn import SparseLinear


@pytest.fixture(autouse=True)
def _threads_stay():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(kind, threads, block):
    """The weights after some steps with updates, and everything the last step computed."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if kind == "torch" else torch.float32
    layer = SparseLinear(192, 160, 0.15, block, generator=generator, dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9)
    trainer = ds.SET(
        torch.nn.Sequential(layer), optimizer, total_steps=8, update_interval=2, seed=1
    )
    given = torch.bfloat16 if kind == "bfloat16" else dtype
    for _ in range(6):
        x = torch.randn(48, 192, generator=generator, dtype=dtype).to(given).requires_grad_()
        optimizer.zero_grad()
        y = layer(x)
        y.square().sum().mul(1e-3).backward()
        trainer.step()
    return [y, x.grad, layer.values, layer.bias, layer.rows, layer.cols]


@pytest.mark.parametrize("block", [1, 8, 16])
@pytest.mark.parametrize("kind", ["sparse", "small", "bfloat16", "torch"])
def test_the_same_bits_again_and_for_any_number_of_threads(kind, block):
    def computed(threads):
        if kind == "torch":
            return run(kind, threads, block)
        with ds.ops.use_kernel("sparse" if kind == "bfloat16" else kind):
            return run(kind, threads, block)

    first = [tensor.detach().clone() for tensor in computed(1)]
    for threads in (1, 2, 3):
        for tensor, wanted in zip(computed(threads), first, strict=True):
            assert torch.equal(tensor, wanted), (kind, threads)
