"""How float32 operands meet the tensor cores."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["tf32", "tf32x3"]
Numbers = Literal["16-bit", "tf32", "tf32x3"]

TERMS = 1024
"""Terms of "tf32x3" that the tensor cores add up before a new sum begins. They cut off what float32
rounds, so the error grows with the sum: 1e-5 of the norm at 1024 terms and 8e-5 at 8192 (emulated,
not measured). Sums that have ended are added as float32 is."""


def precision_of(dtype: torch.dtype) -> Precision:
    """What `tl.dot` calls `input_precision`; 16-bit operands do not heed it.

    float32 is split into three products of tf32 unless torch's own float32 products may use tf32
    (`torch.set_float32_matmul_precision("high")`, or `torch.backends.cuda.matmul.fp32_precision =
    "tf32"`).
    """
    if dtype is not torch.float32:
        return "tf32"
    backend = torch.backends.cuda.matmul
    # From torch 2.9 on the old question is an error for who has used the new setting.
    if hasattr(backend, "fp32_precision"):
        return "tf32" if backend.fp32_precision == "tf32" else "tf32x3"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def numbers_of(dtype: torch.dtype) -> Numbers:
    """What the tensor cores multiply."""
    return precision_of(dtype) if dtype is torch.float32 else "16-bit"
