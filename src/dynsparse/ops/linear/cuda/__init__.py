"""What computes the products off the CPU, one file per route: forward, and both gradients.

Activations stay in their own type. Nothing here makes the host wait for the device, and no sum
depends on the order in which threads come: the same operands give the same bits on every run.
"""

from types import ModuleType

from dynsparse.ops.linear.cuda import blocks, dense

__all__ = ["KERNELS"]

KERNELS: dict[str, ModuleType] = {"dense": dense, "blocks": blocks}
