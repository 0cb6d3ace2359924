"""The products on a GPU beside float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dynsparse.ops.linear.choice import use_kernel
from dynsparse.ops.linear.cuda.chip import runs_triton
from dynsparse.selfcheck.kernels import product_error
from dynsparse.selfcheck.result import Check, checked

__all__ = ["check_gpu"]

# Of float32, as products in TF32 have it where torch is allowed them.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def check_gpu(device: torch.device, generator: torch.Generator) -> Iterator[Check]:
    """The dense way for all blocks, and Triton's kernels for those that have some."""
    for block in (1, 16, 32, 64, 128):
        kinds = ["dense", "blocks"] if block > 1 and runs_triton(device) else ["dense"]
        for kind in kinds:
            for dtype, tolerance in _TOLERANCE.items():
                batch = int(torch.randint(1, 512, (), generator=generator))

                def compare(
                    block: int = block,
                    batch: int = batch,
                    dtype: torch.dtype = dtype,
                    kind: str = kind,
                ) -> float:
                    with use_kernel(kind):
                        return product_error(block, batch, dtype, device, generator)

                what = "elements" if block == 1 else f"blocks of {block}"
                name = f"{what}: {kind}, {str(dtype).removeprefix('torch.')}"
                yield checked("gpu", str(device), name, tolerance, compare)
