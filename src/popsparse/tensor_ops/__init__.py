"""Operations on whole tensors of the tile machine, wherever their elements lie.

Each adds its steps to a program and gives a new tensor. What a tile needs and has not is copied to
it; sums are float32 and round once.
"""

from popsparse.tensor_ops.by_element import OPERATIONS, elementwise
from popsparse.tensor_ops.exponential import softmax
from popsparse.tensor_ops.product import matmul
from popsparse.tensor_ops.reduction import reduce

__all__ = ["OPERATIONS", "elementwise", "matmul", "reduce", "softmax"]
