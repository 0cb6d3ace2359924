"""Data that nobody reads: drawn once on the device, so that a training's time is all compute."""

from __future__ import annotations

import torch
from torch import Tensor

NOTICE = "synthetic data, made once on {device}: time is that of compute, and scores mean nothing"


def random_ids(count: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Ids in [0, count), int64; the same in every run."""
    return torch.randint(count, shape, generator=_generator(device), device=device)


def random_shares(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers in [0, 1), float32; the same in every run."""
    return torch.rand(shape, generator=_generator(device), device=device)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)
