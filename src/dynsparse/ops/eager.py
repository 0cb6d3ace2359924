"""Who watches a call: whether it may take the short way, past torch's dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

__all__ = ["is_plain_eager", "refuse_forward_mode"]


def is_plain_eager(x: Tensor) -> bool:
    """Whether nothing watches the dispatcher: no compiler, mode, transform, autocast, subclass."""
    return not (
        is_compiling()
        or type(x) is not Tensor
        or x.is_meta  # which autocast does not know
        or torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
        or torch.jit.is_tracing()
        or forward_ad._current_level >= 0
    )


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise RuntimeError where a tensor carries a tangent, which the operators would drop."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                "dynsparse's sparse layers have no forward-mode derivative (jvp, jacfwd): "
                "use backward(), torch.func.vjp or jacrev"
            )
