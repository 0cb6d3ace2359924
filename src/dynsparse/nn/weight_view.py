"""What a sparse layer gives to code that reads its `weight`, as it would of an `nn.Linear`.

Most such code asks for the data type or the device, or calls `torch.nn.functional.linear` itself,
with a bias it has put together. Neither needs the dense matrix: the first is answered without one,
the second is the layer's own sparse product. Whatever else is done with the weight is done with a
dense matrix made for it, differentiable in the values, after a warning of what that costs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

# Properties are answered as they stand but for these, which hold entries.
_MADE_OF_ENTRIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_ABOUT = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex",
    "is_contiguous", "stride", "element_size", "get_device", "__len__", "__hash__",
})  # fmt: skip
_INTO = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__imatmul__", "__set__",
    "data_ptr", "untyped_storage", "storage",
})  # fmt: skip


class WeightView(Tensor):
    """The weight of a sparse layer, such as [out, in], to be read. It holds no entries.

    Attributes:
        layer: the `SparseLinear` whose weight it is.
        transposed: whether it is [in, out].
    """

    layer: Any
    transposed: bool

    @staticmethod
    def __new__(cls, layer: Any, transposed: bool = False) -> WeightView:
        values, shape = layer.values, layer.weight_shape
        view = Tensor._make_wrapper_subclass(
            cls,
            shape[::-1] if transposed else shape,
            dtype=values.dtype,
            device=values.device,
            requires_grad=values.requires_grad,
        )
        view.layer, view.transposed = layer, transposed
        return view

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        name = func.__name__
        asked = None
        if name == "__get__":
            asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if asked == "data":
            return args[0]
        if name in _ABOUT or (asked is not None and asked not in _MADE_OF_ENTRIES):
            return super().__torch_function__(func, types, args, kwargs)
        if name in _INTO or (name.endswith("_") and not name.endswith("__")):
            if isinstance(args[0], cls):
                raise RuntimeError(args[0]._refusal())
        elif isinstance(kwargs.get("out"), cls):
            raise RuntimeError(kwargs["out"]._refusal())
        if func is linear and (product := cls._product(*args, **kwargs)) is not None:
            return product
        used: set[Any] = set()
        args, kwargs = _replaced(args, used), _replaced(kwargs, used)
        for layer in used:
            if not layer.told_of_dense_weight:
                layer.told_of_dense_weight = True
                warnings.warn(_cost(layer), stacklevel=2)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only who goes past Python's functions comes here, after autograd.
        views = (thing for thing in (*args, *(kwargs or {}).values()) if isinstance(thing, cls))
        raise RuntimeError(next(views)._refusal())

    @classmethod
    def _product(cls, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
        """The product without a dense matrix, where the layer itself computes like that."""
        if not isinstance(weight, cls) or isinstance(input, cls) or isinstance(bias, cls):
            return None
        if weight.transposed:
            return None
        return weight.layer.product(input, bias)

    def _refusal(self) -> str:
        layer = self.layer
        return (
            f"the dense weight of {_called(layer)} cannot be written to, since it holds values "
            f"alone: write to its values, or {_advice(layer)}"
        )


def _replaced(thing: Any, used: set[Any]) -> Any:
    """`thing` with the dense weight in place of every view, whose layers `used` gets."""
    if isinstance(thing, WeightView):
        used.add(thing.layer)
        dense = thing.layer.to_dense()
        return dense.t() if thing.transposed else dense
    if type(thing) in (list, tuple):
        return type(thing)(_replaced(part, used) for part in thing)
    if type(thing) is dict:
        return {key: _replaced(part, used) for key, part in thing.items()}
    return thing


def _cost(layer: Any) -> str:
    return (
        f"somebody computes with the dense weight of {_called(layer)}, which costs what a dense "
        f"layer does at every call, and growth by gradient does not see it: {_advice(layer)}"
    )


def _called(layer: Any) -> str:
    name = type(layer).__name__
    return f"a {name}" if layer.known_as is None else f"{layer.known_as!r} ({name})"


def _advice(layer: Any) -> str:
    if layer.known_as is None:
        return "use an nn.Linear in its place"
    return f"keep it dense with sparsify(..., exclude=[{layer.known_as!r}])"
