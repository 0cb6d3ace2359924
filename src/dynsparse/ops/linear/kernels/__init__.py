"""What computes the products, one file per route of `choice`: forward, and both gradients."""

from types import ModuleType

from dynsparse.ops.linear.kernels import bfloat16, dense, plain, small, sparse

__all__ = ["KERNELS"]

KERNELS: dict[str, ModuleType] = {
    "sparse": sparse,
    "small": small,
    "dense": dense,
    "bfloat16": bfloat16,
    "torch": plain,
}
