"""Whether the tensors and patterns of a checkpoint fit a model, before anything is changed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dynsparse.files.shorten import shortened
from dynsparse.pattern import SparsePattern


def patterns_of(model: nn.Module) -> dict[str, list[int]]:
    """Shape, block size and number of blocks of every module with a pattern."""
    found = {}
    for name, module in model.named_modules():
        pattern = getattr(module, "pattern", None)
        if isinstance(pattern, SparsePattern):
            found[name] = [*pattern.shape, pattern.block_size, pattern.nnz]
    return found


def check_model(parts: dict[str, Any], model: nn.Module) -> None:
    """Raise ValueError unless the tensors and patterns of a checkpoint fit the model."""
    saved, own = parts["model"], model.state_dict()
    if odd := sorted(saved.keys() ^ own.keys()):
        where = "file" if odd[0] in saved else "model"
        raise ValueError(
            f"{len(odd)} entries are in only one of file and model, such as {odd[0]!r}, "
            f"which is in the {where}"
        )
    resizable: set[str] = set()  # entries whose length follows the number of blocks
    for name, pattern in patterns_of(model).items():
        other = parts["patterns"].get(name)
        module = model.get_submodule(name)
        if (
            getattr(module, "may_resize", False)
            and isinstance(other, list)
            and other[:3] == pattern[:3]
        ):
            prefix = f"{name}." if name else ""
            resizable |= {prefix + key for key in ("values", "rows", "cols")}
        elif not isinstance(other, list) or other != pattern:
            raise ValueError(
                f"layer {name!r} was saved with [out, in, block size, blocks] = "
                f"{shortened(other)}, "
                f"the model has {pattern}"
            )
        _check_pattern(name, module, saved)
    for name, tensor in own.items():
        other = saved[name]
        if not isinstance(tensor, Tensor):
            continue
        skip = 1 if name in resizable else 0
        if not isinstance(other, Tensor):
            raise ValueError(f"{name!r} was saved as {type(other).__name__}, not as a tensor")
        if (tensor.shape[skip:], tensor.dtype) != (other.shape[skip:], other.dtype):
            raise ValueError(
                f"{name!r} was saved as {other.dtype} {list(other.shape)}, the model has "
                f"{tensor.dtype} {list(tensor.shape)}"
            )


def _check_pattern(name: str, module: Any, saved: dict[str, Any]) -> None:
    """The layers check this, too, but when the ones before them have changed already."""
    prefix = f"{name}." if name else ""
    rows, cols, values = (saved.get(prefix + key) for key in ("rows", "cols", "values"))
    if rows is None or cols is None:
        return
    own = module.pattern
    try:
        pattern = SparsePattern(rows, cols, shape=own.shape, block_size=own.block_size)
        if isinstance(values, Tensor) and values.shape != pattern.values_shape:
            raise ValueError(f"{pattern.nnz} blocks with values of {list(values.shape)}")
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the pattern of {name!r} is damaged: {error}") from None
