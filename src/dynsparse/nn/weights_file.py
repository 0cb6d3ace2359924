"""A model's weights in one safetensors file that any safetensors reader understands.

Keys are those of `model.state_dict()`. A sparse layer `name` has

    name.values  [nnz] or [nnz, b, b], the blocks in any order
    name.rows    int32 [nnz], block row of each
    name.cols    int32 [nnz], block column of each
    name.bias    [out], if it has one

so that W[rows[i] b : (rows[i] + 1) b, cols[i] b : (cols[i] + 1) b] = values[i]. The metadata, all
strings, as the format wants:

    format       "dynsparse"
    version      "1"
    layers       JSON: sparse layer -> {"shape": [out, in], "block_size": b, "blocks": nnz}
    aliases      JSON: key -> the key that holds the same tensor, for tied weights
    user         JSON: what `save_safetensors` was given as `metadata`
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dynsparse.checks import check_kind
from dynsparse.files.atomic_write import replaced
from dynsparse.files.limits import parse_json
from dynsparse.files.shorten import shortened
from dynsparse.nn.linear import SparseLinear
from dynsparse.pattern import SparsePattern

_FORMAT, _VERSION = "dynsparse", "1"


def save_safetensors(
    model: nn.Module, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the weights and patterns of `model` to `path`, whole or not at all.

    Args:
        model: its parameters and buffers are written; tied ones once.
        path: the file; its folder must exist.
        metadata: strings to keep along, such as the step.

    Raises:
        TypeError: state that is not tensors, metadata that is not strings.
        OSError: the file cannot be written; what was at `path` is still there.
    """
    from safetensors.torch import save_file  # here: `import dynsparse` loads torch alone

    tensors, aliases = _distinct(state_of(model))
    check_kind("metadata", metadata, (Mapping, type(None)), "a dictionary of texts or None")
    user = dict(metadata or {})
    for key, value in user.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must map strings to strings, got {key!r}: {value!r}")
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "layers": json.dumps(_layers(model)),
        "aliases": json.dumps(aliases),
        "user": json.dumps(user),
    }
    with replaced(Path(path)) as temporary:
        # Opened here first: a missing folder is then an OSError that names it.
        temporary.touch()
        save_file(tensors, temporary, header)


def load_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> dict[str, str]:
    """Put the weights and patterns of a file of `save_safetensors` into `model`.

    Everything is checked before anything is changed. The Parameter objects stay, so an optimizer
    made before goes on; its own state is not in the file (see `dynsparse.training.checkpoint`).

    Returns:
        The `metadata` that was saved along.

    Raises:
        ValueError: a file that is truncated, damaged, not of `save_safetensors`, or of another
            model; one line that says where they differ.
        OSError: the file cannot be read.
    """
    path = Path(path)
    header, tensors = read_tensors(path)
    _check_format(path, header)
    tensors = read_aliases(path, header, tensors)
    try:
        layers = parse_json(header["layers"])
        user = parse_json(header["user"])
        _check_metadata(layers, user)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error)[:200]
        raise ValueError(f"{path} is damaged: its metadata cannot be read ({reason})") from None
    try:
        _check(model, layers, tensors)
    except ValueError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from None
    model.load_state_dict(tensors)
    return user


def _check_metadata(layers: Any, user: Any) -> None:
    for layer in layers.values():
        numbers = [*layer["shape"], layer["block_size"], layer["blocks"]]
        if len(numbers) != 4 or not all(type(number) is int for number in numbers):
            raise ValueError(f"expected shape, block size and blocks, got {shortened(layer)}")
    if not isinstance(user, dict) or not all(isinstance(text, str) for text in user.values()):
        raise ValueError(f"expected texts by name, got {shortened(user)}")


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()`, of which all are tensors."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    state = model.state_dict()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"a safetensors file holds only tensors, but {name!r} of the model's state is "
                f"{type(tensor).__name__}: save the model with dynsparse.training.save_checkpoint"
            )
    return state


def _layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "shape": list(module.pattern.shape),
            "block_size": module.block_size,
            "blocks": module.pattern.nnz,
        }
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SparseLinear)
    }


def _distinct(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state with each tensor once, contiguous and without shared memory, and the aliases."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        # safetensors refuses tensors that overlap in memory, as parts of one buffer may.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in storages else tensor
        tensors[name] = tensors[name].contiguous()
        storages.add(storage)
    return tensors, aliases


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of any safetensors file."""
    import safetensors

    path.open("rb").close()  # a missing or unreadable file is an OSError that names it
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is truncated or no safetensors file: {reason}") from None
    return header, tensors


def is_own(header: Mapping[str, str]) -> bool:
    """Whether the file is of `save_safetensors`."""
    return header.get("format") == _FORMAT


def read_aliases(
    path: Path, header: Mapping[str, str], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors under all their names, where the file is of `save_safetensors`."""
    if not is_own(header):
        return tensors
    _check_format(path, header)
    try:
        found = {name: tensors[key] for name, key in parse_json(header["aliases"]).items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error)[:200]
        raise ValueError(f"{path} is damaged: its metadata cannot be read ({reason})") from None
    return tensors | found


def _check_format(path: Path, header: Mapping[str, str]) -> None:
    if not is_own(header):
        raise ValueError(
            f"{path} was not written by save_safetensors: expected the metadata format={_FORMAT}, "
            f"got {shortened(header.get('format'))}; dynsparse.load_pretrained reads others"
        )
    if header.get("version") != _VERSION:
        raise ValueError(
            f"{path} has format version {str(header.get('version'))[:20]}, this dynsparse reads "
            f"version {_VERSION}: load it with the dynsparse that wrote it"
        )


def _check(
    model: nn.Module, layers: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> None:
    own = state_of(model)
    for name, found in _layers(model).items():
        saved = layers.get(name)
        if saved is None:
            raise ValueError(f"the layer {name!r} is not sparse in the file")
        resizable = model.get_submodule(name).resizable
        if any(saved[k] != v for k, v in found.items() if not (resizable and k == "blocks")):
            raise ValueError(
                f"the layer {name!r} is {_described(saved)} in the file, {_described(found)} in "
                "the model: build the model with the same shapes, densities and block sizes"
            )
    if odd := sorted(tensors.keys() ^ own.keys()):
        where = "file" if odd[0] in tensors else "model"
        raise ValueError(f"{odd[0]!r} and {len(odd) - 1} more keys are only in the {where}"
                         if len(odd) > 1 else f"{odd[0]!r} is only in the {where}")  # fmt: skip
    parts = {f"{name}.{part}" if name else part: name for name in layers
             for part in ("values", "rows", "cols")}  # fmt: skip
    for name, tensor in own.items():
        other = tensors[name]
        if other.dtype != tensor.dtype:
            raise ValueError(
                f"{name!r} is {other.dtype} in the file, {tensor.dtype} in the model: convert the "
                "model first, with model.to(dtype)"
            )
        if name not in parts and other.shape != tensor.shape:
            raise ValueError(
                f"{name!r} has the shape {list(other.shape)} in the file, {list(tensor.shape)} in "
                "the model"
            )
    for name, saved in layers.items():
        _check_pattern(name, saved, tensors)


def _check_pattern(name: str, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    prefix = f"{name}." if name else ""
    rows, cols, values = (tensors[prefix + part] for part in ("rows", "cols", "values"))
    try:
        pattern = SparsePattern(rows, cols, shape=saved["shape"], block_size=saved["block_size"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"the pattern of {name!r} is damaged: {error}") from None
    if values.shape != pattern.values_shape or len(rows) != saved["blocks"]:
        raise ValueError(
            f"the pattern of {name!r} is damaged: expected {saved['blocks']} blocks "
            f"with as many values, got {len(rows)} and values of the shape "
            f"{list(values.shape)}"
        )


def _described(layer: Mapping[str, Any]) -> str:
    out, in_features = layer["shape"]
    return f"{out} x {in_features} with {layer['blocks']} blocks of {layer['block_size']}"
