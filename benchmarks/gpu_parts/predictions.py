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
    "step blocks 8": 0.95,
    "step blocks 4": 0.95,
    "float32 blocks 128": 8.0,
    "float32 blocks 64": 8.0,
    "float32 blocks 32": 5.0,
    "scores": 0.8,
    "transformer layer, blocks 64": 2.5,
    "grid": 0.9,
}

# Of the bound of forward, by block.
WANTED_SHARE: dict[int, float] = {32: 0.6, 64: 0.6, 128: 0.6}

# Of what a dense layer holds with Adam, by block, at density 0.1: 16 bytes for each weight, and
# another 4 for each block.
STATE: dict[int, float] = {1: 0.125, 8: 0.1004, 64: 0.1}

# Percent of training that an update every 100 steps takes at most, by block.
WANTED_PERCENT: dict[int, float] = {64: 2.0, 32: 2.0}
