"""Who watches a call: whether it may take the short way, past torch's dispatcher.

Where other layers have had the caches in between, whatever is touched for the first time costs a
microsecond or more: a function, an attribute, a small object. So this asks as little as it can, and
torch's own core instead of the functions around it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

_any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_tracing_state = torch._C._get_tracing_state


def is_plain_eager(x: Tensor, autocast: bool = False) -> bool:
    """Whether nothing watches the dispatcher: no compiler, mode, transform, autocast, subclass.

    Args:
        autocast: may be there, since the caller does what it would do.
    """
    return not (
        is_dynamo_compiling()  # other compilers bring modes, or tensors of their own
        or type(x) is not Tensor
        or not (x.is_cpu or not x.is_meta)  # which autocast does not know
        or (not autocast and is_autocast(x))
        or _dispatch_modes()
        or _transforms() is not None
        or _is_wrapped(x)  # and so one that has left its transform
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def is_autocast(x: Tensor) -> bool:
    """Whether torch.autocast is on where `x` is."""
    return _any_autocast() and torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type)


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


# (size, stride, dtype) -> a tensor on the CPU, of any contents: what the code calls that torch
# compiles, at a third of the price of a call through the dispatcher.
empty_on_cpu = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", _empty_strided)


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
