"""Shared by every test: few examples, no deadlines, since machines that run tests are busy."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("dynsparse", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("dynsparse")


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
