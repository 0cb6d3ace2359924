"""The dense product on the same machine: its plan over the tiles, and its cost.

`plan(m, k, n, dtype, target)` finds, for C[m, n] = A[m, k] B[k, n], the cut that poplibs' planner
would choose: a 1x1 convolution in the matrix units (AMP) or by vector multiply-accumulate (HMAC),
split over the tiles in the streamed field, the out-channels and the in-channels, and in time
(serial splits). See section 7 of docs/popsparse-formulas.md; no constant is fitted.
"""

from popsparse.planning.dense import DensePlan, plan

__all__ = ["DensePlan", "plan"]
