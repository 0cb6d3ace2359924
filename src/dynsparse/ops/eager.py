"""Who watches a call: whether it may take the short way, past torch's dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

__all__ = ["is_plain_eager", "refuse_transforms"]


def is_plain_eager(x: Tensor, autocast: bool = False) -> bool:
    """Whether nothing watches the dispatcher: no compiler, mode, transform, autocast, subclass.

    Args:
        autocast: may be there, since the caller does what it would do.
    """
    return not (
        is_compiling()
        or type(x) is not Tensor
        or x.is_meta  # which autocast does not know
        or (not autocast and torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type))
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
        or torch.jit.is_tracing()
        or forward_ad._current_level >= 0
    )


def refuse_transforms(what: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError where torch.func, or a tangent, wants what `what` has no rule for."""
    if is_compiling():
        return  # the compiler refuses transforms of what it cannot trace itself
    wanted = torch._C._functorch.peek_interpreter_stack() is not None
    if forward_ad._current_level >= 0:
        given = (tensor for tensor in tensors if tensor is not None)
        wanted |= any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)
    if wanted:
        raise RuntimeError(
            f"{what} has no rule for torch.func, vmap included, and no forward-mode derivative: "
            "use backward(), or dynsparse.densify first"
        )
