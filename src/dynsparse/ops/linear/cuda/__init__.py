"""Products on other devices than the CPU, one file per route: forward, and both gradients.

Activations keep their type. Nothing here synchronises with the host, and no sum depends on the
order in which threads run: the same operands give the same bits on every run.
"""

from types import ModuleType

from dynsparse.ops.linear.cuda import blocks, dense
from dynsparse.ops.linear.layer_index import LayerIndex

__all__ = ["KERNELS", "derive"]

KERNELS: dict[str, ModuleType] = {"dense": dense, "blocks": blocks}


def derive(p: LayerIndex) -> None:
    """Make what the kernels read besides the index of a layer on a CUDA device.

    Called when the index is made, not in the first pass, which may run inside a memory pool of CUDA
    graphs (`torch.compile(mode="reduce-overhead")`), where nothing may be kept.
    """
    if p.cols.is_cuda:
        blocks.derive(p)
        dense.derive(p)
