"""Factories of valid objects that recipes use."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import dynsparse as ds


def pattern(block=1):
    return ds.SparsePattern.random(
        (8, 12), nnz=6, block_size=block, generator=torch.Generator().manual_seed(0)
    )


def layer(block=1):
    return ds.nn.SparseLinear(12, 8, density=0.25, block_size=block)


def model():
    return nn.Sequential(layer(), nn.ReLU(), nn.Linear(8, 4))


def values():
    return torch.randn(6)


def generator():
    return torch.Generator().manual_seed(0)


def rewiring():
    before = pattern()
    free = (before.to_mask().flatten() == 0).nonzero().flatten()
    return ds.pattern.Rewiring.make(before, torch.tensor([1, 3]), free[[0, 5]])


def folder():
    return Path(tempfile.mkdtemp(prefix="dynsparse-api-"))


X = torch.ones(3, 12)
