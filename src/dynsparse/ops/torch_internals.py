"""The private names of torch that the operators use, and the fallbacks for a torch without them.

Calls with ordinary tensors bypass torch's dispatcher, whose way through Python costs tens of
microseconds, more than the products of a small layer. Whether a call may do so must be asked of
torch's core: the public functions around it, where they exist, cost a microsecond or more whenever
other layers have had the caches in between. In a torch that lacks one of the names asked for this,
every call goes through the dispatcher, which is correct and slower.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

_missing: list[str] = []


def _find(name: str, fallback: Any) -> Any:
    """Return the attribute `name` of torch, or the fallback if this torch lacks it."""
    try:
        return attrgetter(name)(torch)
    except AttributeError:
        _missing.append(name)
        return fallback


# The names that tell what intercepts calls. If torch lacks one of these, `_count_modes` keeps every
# call from being plain eager.
_any_autocast = _find("_C._is_any_autocast_enabled", lambda: True)
_count_modes = _find("_C._len_torch_dispatch_stack", lambda: 1)
_transforms = _find("_C._functorch.peek_interpreter_stack", lambda: None)
is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: False)
_tracing_state = _find("_C._get_tracing_state", lambda: None)
_unwrap = _find("_C._functorch.get_unwrapped", lambda tensor: tensor)
is_batched = _find("_C._functorch.is_legacy_batchedtensor", lambda tensor: False)
"""Whether a gradient stands for several, with `is_grads_batched=True`."""

_find("autograd.forward_ad._current_level", -1)  # changes, so it is read where it is used
if _missing:

    def _count_modes() -> int:
        return 1


def is_plain_eager(x: Tensor, autocast: bool = False) -> bool:
    """Whether no compiler, mode, transform, autocast or tensor subclass needs to see this call.

    Args:
        autocast: whether autocast is allowed, because the caller does its casts.
    """
    return not (
        is_dynamo_compiling()  # other compilers use modes or their own tensors
        or type(x) is not Tensor
        or x.is_meta  # autocast does not know meta tensors
        or (not autocast and is_autocast(x))
        or _count_modes()
        or _transforms() is not None
        or is_wrapped(x)  # a tensor that has left its transform
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def is_autocast(x: Tensor) -> bool:
    """Whether torch.autocast is enabled on the device of `x`."""
    return _any_autocast() and torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type)


def has_modes() -> bool:
    """Whether modes (`TorchDispatchMode`) are active."""
    return bool(_count_modes())


def dispatch_modes() -> list[Any]:
    """Return the active modes; FLOP counters among them copied their formulas when they began."""
    try:
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    except ImportError:
        return []
    return list(_get_current_dispatch_mode_stack())


def _is_forward_mode() -> bool:
    return getattr(forward_ad, "_current_level", -1) >= 0


def is_transformed() -> bool:
    """Whether a transform of `torch.func`, or forward-mode differentiation, is active."""
    return _transforms() is not None or _is_forward_mode()


def unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor inside all transforms of torch.func, with the dimensions of vmap."""
    while is_wrapped(tensor):
        tensor = _unwrap(tensor)
    return tensor


def refuse_transforms(what: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError in a transform of torch.func, or for a tensor with a tangent."""
    if is_compiling():
        return  # the compiler refuses transforms that it cannot trace
    transformed = _transforms() is not None
    if _is_forward_mode():
        operands = (tensor for tensor in tensors if tensor is not None)
        transformed |= any(forward_ad.unpack_dual(t).tangent is not None for t in operands)
    if transformed:
        raise RuntimeError(
            f"{what} has no rule for torch.func, vmap included, and no forward-mode derivative: "
            "use backward(), or dynsparse.densify first"
        )


def refuse_onnx_export(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the forward function of an operator, for `Library.impl`, to fail in `torch.onnx.export`.

    torch's own error, which comes later, does not tell the user what to do.
    """

    @functools.wraps(forward)
    def checked(*operands: Any) -> Tensor:
        onnx = sys.modules.get("torch.onnx")  # imported by its first use
        if onnx is not None and onnx.is_in_onnx_export():
            raise RuntimeError(
                "torch.onnx.export does not support sparse layers: use "
                "dynsparse.integrations.onnx.export(model, args, file)"
            )
        return forward(*operands)

    return checked


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


# (size, stride, dtype) -> an uninitialised tensor on the CPU: what compiled code calls, at a third
# of the cost of a call through the dispatcher.
empty_on_cpu: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = _find(
    "_C._dynamo.guards._empty_strided_cpu", _empty_strided
)


def fast_apply(function: type[Function]) -> Callable[..., Any]:
    """Return `raw_apply` of an autograd Function for calls that are plain eager.

    Its backward skips the search for other kinds of derivatives.
    """
    backward_class = vars(function).get("_backward_cls")
    if backward_class is not None:
        backward_class.apply = function.backward
    return raw_apply(function)


def raw_apply(function: type[Function]) -> Callable[..., Any]:
    """Return `apply` of an autograd Function without functorch's wrappers.

    For calls that no transform sees, since the wrappers cost as much as the products of a small
    layer, and inside an operator, where the transform has been dispatched already.
    """
    parent: Any = super(Function, function)
    apply: Callable[..., Any] = parent.apply
    return apply


def is_recording() -> bool:
    """Whether operators called now may get derivatives, in reverse or forward mode."""
    return torch.is_grad_enabled() or _is_forward_mode()


def skip_autograd() -> AbstractContextManager:
    """Skip autograd in calls of operators, as `torch.library.register_autograd` does.

    That function itself offers no derivatives in forward mode.
    """
    return torch._C._AutoDispatchBelowAutograd()


def is_gradient_needed(node: Any) -> bool:
    """Whether the backward pass in progress computes the gradient for the autograd `node`.

    Pipelines that split the pass go through a layer twice, once for the gradient of its input and
    once for that of its values.
    """
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except (AttributeError, RuntimeError):
        return True  # RuntimeError: a leaf that `torch.autograd.grad` was asked for


def backward_pass() -> int:
    """Return the number of the backward pass in progress; -1 if this torch does not number them."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if current is None else current()


def distributed_caller() -> FrameType | None:
    """Return the frame of torch's function that calls a module's `named_buffers`, or None.

    Call it in `named_buffers`. It is None unless the function shards modules or renames entries of
    their state dicts: `fully_shard` and the state dicts of torch.distributed.checkpoint read
    `named_buffers`, and torch offers modules no hook there.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(2):  # `Module.buffers` may be in between
        if frame is None:
            return None
        file, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        if file.endswith("torch/distributed/checkpoint/state_dict.py") or (
            name == "_get_managed_states" and "torch/distributed/fsdp/" in file
        ):
            return frame
        frame = frame.f_back
    return None
