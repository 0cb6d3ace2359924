"""Load weights and patterns from files into a model that is dense as its code builds it.

It reads files of `save_safetensors`, and files of other libraries that store a `state_dict()`
unchanged, as `save_pretrained` of Hugging Face does: one file, or shards with an index. A sparse
layer is stored as `values`, `rows` and `cols`; its shape is that of the dense layer it replaces,
its block size that of the values.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.files.limits import parse_json, read_limit
from dynsparse.files.shorten import shortened
from dynsparse.interrupts import uninterrupted
from dynsparse.nn.candidates import Candidate, find_candidates
from dynsparse.nn.convert import (
    check_replaceable,
    disable_fast_paths,
    make_sparse_layer,
    replace_layers,
)
from dynsparse.nn.exclusions import OVERRIDABLE, default_exclusions
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.weights_file import is_own, read_aliases, read_tensors, state_of
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PARTS = ("rows", "cols", "values")


@typed
def load_pretrained(model: nn.Module, folder_or_file: str | os.PathLike[str]) -> nn.Module:
    """Load a saved sparse model into `model`; layers that are sparse in the file become sparse.

    Build the model as it was before `sparsify`: dense and of the same dtype. Layers that are
    already sparse must have the shape and the number of blocks of the file. The Parameters of the
    weights are new, so create the optimizer afterwards.

    Args:
        model: the model, changed in place.
        folder_or_file: a safetensors file, the index of a sharded one, or a folder with
            model.safetensors or model.safetensors.index.json, as `save_pretrained` writes them.

    Returns:
        The model.

    Raises:
        ImportError: the package safetensors is missing.
        OSError: a file is missing or cannot be read.
        ValueError: a truncated or damaged file, or one of another model; the message is one line
            on the first difference. The model is then unchanged.
    """
    path = Path(folder_or_file)
    tensors, has_model_names = _read(path)
    try:
        if not has_model_names:
            tensors = convert_transformers_names(model, tensors)
        with uninterrupted():
            _load(model, tensors)
    except ValueError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from None
    return model


def _read(path: Path) -> tuple[dict[str, Tensor], bool]:
    """All tensors of a file, an index or a folder by name, and whether `save_safetensors` wrote
    them, so that the names are those of the model."""
    if path.is_dir():
        files = [path / name for name in (_INDEX, _FILE) if (path / name).is_file()]
        if not files:
            raise FileNotFoundError(
                f"expected {_FILE} or {_INDEX} in the folder {path}, found neither: save with "
                "save_pretrained() or dynsparse.save_safetensors"
            )
        path = files[0]
    if path.suffix != ".json":
        header, tensors = read_tensors(path)
        return read_aliases(path, header, tensors), is_own(header)
    tensors = {}
    for file, names in _shards(path).items():
        _, part = read_tensors(file)
        for name in names:
            if name not in part:
                raise ValueError(f"{path} says that {file.name} holds {name!r}, which it does not")
            tensors[name] = part[name]
    return tensors, False


def _shards(path: Path) -> dict[Path, list[str]]:
    """File -> the names of its tensors, according to the index."""
    if path.stat().st_size > read_limit():
        raise ValueError(f"{path} is too large for an index")
    try:
        weight_map = parse_json(path.read_bytes())["weight_map"]
        names = [(name, file) for name, file in weight_map.items() if isinstance(file, str)]
        if len(names) < len(weight_map):
            raise TypeError("a file name that is not a string")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is no index of a sharded model: {reason}") from None
    shards: dict[Path, list[str]] = {}
    for name, file in names:
        # Files outside of the folder are not read, even if an untrusted index names them.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{path} must name safetensors files beside it, got {shortened(file)}")
        shards.setdefault(path.parent / file, []).append(name)
    return shards


def _load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    candidates = find_candidates(model)
    names = _sparse_names(candidates, tensors)
    _share_values(candidates, names, tensors)
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear) and name not in names:
            raise ValueError(f"the layer {name!r} is not sparse in the file")
    layers = _layers(model, candidates, names, tensors)
    replaced = replace_layers(model, candidates, layers)
    try:
        _check(model, tensors)
        model.load_state_dict(tensors, strict=False)
    except BaseException:
        for name, module in replaced.items():
            model.set_submodule(name, module)
        raise
    disable_fast_paths(model)


def _sparse_names(candidates: Mapping[str, Candidate], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the sparse layers in the file. Tied layers may have their values under one name."""
    keys = [name for name in tensors if name == "rows" or name.endswith(".rows")]
    return [
        name
        for name in (key.rpartition(".")[0] for key in keys)
        if _key(name, "cols") in tensors and (name in candidates or _key(name, "values") in tensors)
    ]


def _key(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _share_values(
    candidates: Mapping[str, Candidate], names: list[str], tensors: dict[str, Tensor]
) -> None:
    """Add the values of tied layers, which most files have once, under all their names."""
    by_weight = {
        candidates[name].key: tensors[_key(name, "values")]
        for name in names
        if name in candidates and _key(name, "values") in tensors
    }
    for name in names:
        if name in candidates and candidates[name].key in by_weight:
            tensors.setdefault(_key(name, "values"), by_weight[candidates[name].key])


def _layers(
    model: nn.Module,
    candidates: Mapping[str, Candidate],
    names: list[str],
    tensors: Mapping[str, Tensor],
) -> dict[str, SparseLinear]:
    """Name -> the sparse layer to put there; tied weights share one layer."""
    excluded = {
        n: reason
        for n, reason in default_exclusions(model, candidates).items()
        if reason not in OVERRIDABLE
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    shared: dict[tuple[int, str | None], SparseLinear] = {}
    layers: dict[str, SparseLinear] = {}
    for name in names:
        candidate = candidates.get(name)
        if candidate is None:
            module = modules.get(name)
            if isinstance(module, SparseLinear):
                pattern = _pattern(name, tensors, module.pattern.shape, module.block_size)
                try:
                    module._check_capacity(pattern)
                except ValueError as error:
                    raise ValueError(f"{name!r}: {error}") from None
                continue
            kind = "no such layer" if module is None else f"a {type(module).__name__} there"
            raise ValueError(f"{name!r} is a sparse layer in the file, the model has {kind}")
        check_replaceable(candidate)
        if name in excluded:
            raise ValueError(
                f"{name!r} is sparse in the file, but in the model it {excluded[name]}"
            )
        if candidate.key not in shared:
            pattern = _pattern(name, tensors, candidate.matrix_shape)
            values = tensors[_key(name, "values")]
            if values.dtype != candidate.weight.dtype:
                raise ValueError(
                    f"the values of {name!r} are {values.dtype} in the file, "
                    f"{candidate.weight.dtype} in the model: convert the model first, with "
                    "model.to(dtype)"
                )
            shared[candidate.key] = make_sparse_layer(candidate, pattern, values, torch.Generator())
        layers[name] = shared[candidate.key]
    for name, candidate in candidates.items():
        if candidate.key in shared and name not in layers:
            raise ValueError(f"the tied layer {name!r} is dense in the file, others of it sparse")
    return layers


def _pattern(
    name: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], block_size: int | None = None
) -> SparsePattern:
    if _key(name, "values") not in tensors:
        raise ValueError(f"the sparse layer {name!r} has no values in the file")
    rows, cols, values = (tensors[_key(name, part)] for part in _PARTS)
    square = values.dim() == 3 and values.shape[1] == values.shape[2] >= 1
    if values.dim() != 1 and not square:
        raise ValueError(
            f"the values of {name!r} must be [nnz] or [nnz, b, b], got {list(values.shape)}"
        )
    b = 1 if values.dim() == 1 else values.shape[1]
    try:
        pattern = SparsePattern._in_order(rows, cols, shape=shape, block_size=b)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the pattern of {name!r} does not fit: {error}") from None
    if values.shape != pattern.values_shape:
        raise ValueError(
            f"the pattern of {name!r} is damaged: expected as many values as blocks, "
            f"got {len(rows)} blocks and values of the shape {list(values.shape)}"
        )
    if block_size not in (None, b):
        raise ValueError(f"{name!r} has blocks of {b} in the file and of {block_size} in the model")
    return pattern


def _check(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Check that the tensors fit the model, key by key; tied tensors may be given once."""
    state: dict[str, Any] = state_of(model)
    given = {_memory(state[name]) for name in tensors if name in state}
    for name in sorted(tensors.keys() - state.keys()):
        raise ValueError(f"{name!r} is only in the file")
    for name, tensor in state.items():
        other = tensors.get(name)
        if other is None:
            if _memory(tensor) not in given or not tensor.numel():
                raise ValueError(f"{name!r} is only in the model")
        elif other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise ValueError(
                f"{name!r} is {other.dtype} {list(other.shape)} in the file, "
                f"{tensor.dtype} {list(tensor.shape)} in the model"
            )
        elif tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device: give the model its weights first")


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def convert_transformers_names(
    model: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a file of `save_pretrained`, by the names of `model.state_dict()`.

    `save_pretrained` of transformers 5 writes weights under the names, and experts in the shapes,
    of earlier versions, and `from_pretrained` converts them back. This does the same, with the
    conversions that transformers lists.

    Raises:
        ValueError: transformers cannot make one of the model's tensors of those of the file.
    """
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return dict(tensors)
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError:  # before version 5 there are no conversions
        return dict(tensors)
    changes: list[Any] = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    changes = [c for c in changes if not isinstance(c, core_model_loading.PrefixChange)]
    converters = [c for c in changes if isinstance(c, core_model_loading.WeightConverter)]
    renamings = [c for c in changes if not isinstance(c, core_model_loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    converted: dict[str, Tensor] = {}
    pending: dict[str, Any] = {}
    for name in sorted(tensors, key=core_model_loading.dot_natural_key):
        new, pattern = core_model_loading.rename_source_key(name, renamings, converters)
        if pattern is None:
            converted[new] = tensors[name]
            continue
        converter = pending.setdefault(new, copy.deepcopy(by_pattern[pattern]))
        converter.add_tensor(new, name, pattern, tensors[name])
    for new, converter in pending.items():
        try:
            parts = converter.convert(new, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"transformers cannot make {new!r} of the file: {reason}") from None
        converted |= {key: t[0] if isinstance(t, list) else t for key, t in parts.items()}
    return converted
