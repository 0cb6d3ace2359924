"""The sparse fully connected operator, Y = X W^T + bias."""

from dynsparse.ops.linear.autograd import grad_input, grad_weight, layer_linear, linear
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.ops.linear.products import use_kernel

__all__ = ["LayerIndex", "grad_input", "grad_weight", "layer_linear", "linear", "use_kernel"]
