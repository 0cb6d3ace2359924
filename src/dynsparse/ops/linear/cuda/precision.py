"""How float32 operands meet the tensor cores."""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["Precision", "precision_of"]

Precision = Literal["tf32", "tf32x3"]


def precision_of(dtype: torch.dtype) -> Precision:
    """What `tl.dot` calls `input_precision`; 16-bit operands do not heed it.

    float32 is split into three products of tf32, which err about as float32 does, unless torch's
    own float32 products may use tf32 (`torch.set_float32_matmul_precision("high")`, or
    `torch.backends.cuda.matmul.fp32_precision = "tf32"`).
    """
    if dtype is not torch.float32:
        return "tf32"
    backend = torch.backends.cuda.matmul
    # From torch 2.9 on the old question is an error for who has used the new setting.
    if hasattr(backend, "fp32_precision"):
        return "tf32" if backend.fp32_precision == "tf32" else "tf32x3"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
