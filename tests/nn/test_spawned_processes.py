"""A model sent to a spawned process computes the same outputs."""

import pytest
import torch
from torch import nn

import dynsparse as ds


def compute(model, x, results):
    results.put(model(x).detach().numpy())  # not in shared memory, which ends with the process


@pytest.mark.slow
def test_model_in_spawned_process():
    context = torch.multiprocessing.get_context("spawn")
    model = nn.Sequential(ds.nn.SparseLinear(16, 8, 0.3), ds.nn.SparseLinear(8, 4, 0.5, 2))
    x, results = torch.randn(3, 16), context.SimpleQueue()
    process = context.Process(target=compute, args=(model, x, results))
    process.start()
    assert torch.allclose(torch.from_numpy(results.get()), model(x))
    process.join()
    assert process.exitcode == 0
