"""Training loops of other libraries on two ranks equal DistributedDataParallel or one process."""

from __future__ import annotations

import os

import loops
import pytest
import torch
from processes import on_ranks
from rank_trainings import apart, model_of, weights

os.environ.setdefault("KERAS_BACKEND", "torch")
for name in ("lightning", "accelerate", "transformers", "keras"):
    pytest.importorskip(name)


@pytest.mark.slow
def test_every_loop_equals_plain_ddp():
    first, second = on_ranks(2, loops.train_with_every_loop)
    assert not apart(first["plain"], weights(model_of()))[0]
    for name, found in first.items():
        assert apart(found, second[name]) == (True, 0.0), name
        same, difference = apart(found, first["plain"])
        assert same, name
        assert difference < 1e-10, name


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
def test_keras_averages_over_ranks(accumulated):
    (one,) = on_ranks(1, loops.keras)
    first, second = on_ranks(2, loops.keras, accumulated)
    for name, tensor in one.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, rtol=1e-9, atol=1e-12)
