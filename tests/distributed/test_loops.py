"""Lightning, Accelerate and Hugging Face in two processes: as DistributedDataParallel by hand."""

from __future__ import annotations

import loops
import pytest
from processes import on_ranks
from rank_trainings import apart, model_of, weights

for name in ("lightning", "accelerate", "transformers"):
    pytest.importorskip(name)


@pytest.mark.slow
def test_every_loop_trains_as_the_plain_wrapper_does():
    first, second = on_ranks(2, loops.all_of_them)
    assert not apart(first["plain"], weights(model_of()))[0]
    for name, found in first.items():
        assert apart(found, second[name]) == (True, 0.0), name
        same, difference = apart(found, first["plain"])
        assert same, name
        assert difference < 1e-10, name
