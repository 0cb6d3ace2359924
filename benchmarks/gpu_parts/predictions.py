"""What was expected of an H200 before anything was measured on one; results are printed beside it.

Microseconds, for 16-bit operands, 4096 x 4096 features, 8192 samples and density 0.1, where nothing
else is said. Kernels over blocks: 60 % of their bounds and 5 us. None of these figures was touched
after a measurement: what misses tells where the thinking was wrong.
"""

from __future__ import annotations

EXPECTED: dict[str, float] = {
    "copy TB/s": 4.3,
    "L2 read TB/s": 9.7,
    "dense 4096": 174,
    "dense 8192": 348,
    "dense 16384": 696,
    "dense float32": 5300,
    "dense tf32": 696,
    "masks": 39,
    "launch of a torch operator": 5,
    "launch of a Triton kernel": 15,
    "blocks 128": 63,
    "blocks 64": 97,
    "blocks 32": 171,
    "blocks 16": 319,
    "lay out": 20,
    "scores": 450,
    "update": 150,
}

# Ratios to a masked dense layer, or to the dense product, that the kernels are to reach at least.
WANTED: dict[str, float] = {
    "step blocks 128": 5.0,
    "step blocks 64": 3.6,
    "step blocks 32": 2.1,
    "step blocks 16": 1.1,
    "step elements": 0.95,
    "forward float32 blocks 64": 8.0,
    "transformer layer, blocks 64": 2.5,
}
