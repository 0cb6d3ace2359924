"""Read checkpoints of the applications and compare their contents."""

from pathlib import Path

import torch
from checkpoint_files import read_parts

# Times differ; the training draws from neither Python's nor NumPy's generator.
NOT_COMPARED = {"seconds", "update_seconds", "tokens_per_second", "python", "numpy"}


def state(path: Path) -> dict:
    return read_parts(path)


def assert_equal(first, second, where="") -> None:
    assert type(first) is type(second), where
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first.keys() - NOT_COMPARED:
            assert_equal(first[key], second[key], f"{where}/{key}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), where
        for index, pair in enumerate(zip(first, second, strict=True)):
            assert_equal(*pair, f"{where}/{index}")
    else:
        assert first == second, where
