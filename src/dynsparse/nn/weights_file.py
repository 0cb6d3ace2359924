"""Weights and patterns of models in safetensors files: one writer, one loader.

`load_safetensors` loads into a sparse model, `load_pretrained` into a model that is still dense,
also from files of other libraries that store a `state_dict()` unchanged, as `save_pretrained` of
Hugging Face does: one file, or shards with an index.

In the files of `save_safetensors`, which any safetensors reader understands, the keys are those of
`model.state_dict()`, but for the patterns. A sparse layer `name` has

    name.values  [nnz] or [nnz, b, b], the blocks in row-major order, in the dtype of the layer
    name.gaps    uint8 [n], which blocks these are, or
    name.mask    uint8 [ceil(blocks / 8)], the same; see `dynsparse.pattern.packed`
    name.bias    [out], if it has one
    name.scale   float32 [out], if values are int8: W[r, c] = scale[r] * value

Other files may have `rows` and `cols` instead, int32 [nnz], with the blocks in any order, so that
W[rows[i] b : (rows[i] + 1) b, cols[i] b : (cols[i] + 1) b] = values[i]. The metadata are strings,
as the format requires:

    format       "dynsparse"
    version      "2"
    layers       JSON: sparse layer -> {"shape": [out, in], "block_size": b, "blocks": nnz}, with
                 int8 values also {"activations": "float32" or "int8"}
    aliases      JSON: key -> the key that holds the same tensor, for tied weights
    user         JSON: the argument `metadata` of `save_safetensors`
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_kind, check_types, describe_error, shorten
from dynsparse._core.files.atomic_write import replace_file
from dynsparse._core.files.limits import check_regular, parse_json, read_limit
from dynsparse._core.interrupts import defer_signals
from dynsparse.nn.active_set import warn_of_active_sets
from dynsparse.nn.candidates import Candidate, find_candidates, join_names
from dynsparse.nn.convert import (
    check_replaceable,
    disable_fast_paths,
    make_sparse_layers,
    replace_layers,
)
from dynsparse.nn.embedding import TiedHead
from dynsparse.nn.exclusions import OVERRIDABLE, default_exclusions
from dynsparse.nn.init import materialize_meta_tensors
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.quantized import ACTIVATIONS, QuantizedSparseLinear, replace_by_quantized
from dynsparse.nn.transformers_import import convert_names, set_quantizers
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.packed import PACKED, pack, unpack

_FORMAT, _VERSION = "dynsparse", "2"
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PARTS = ("rows", "cols", "values")

Layers = Mapping[str, Mapping[str, Any]]
"""Sparse layer -> its "shape", "block_size" and number of "blocks"."""


class WeightsFile(NamedTuple):
    """The content of a safetensors file.

    Attributes:
        tensors: name -> tensor, with all names of tied tensors.
        layers: the sparse layers of a file of `save_safetensors`; None for other files.
        metadata: the user's metadata.
    """

    tensors: dict[str, Tensor]
    layers: Layers | None
    metadata: dict[str, str]


def save_safetensors(
    model: nn.Module, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the weights and patterns of `model` to a file, atomically.

    A pattern takes at most one bit per block of the matrix. Values are in row-major order, which
    may differ from that of the slots after pattern updates, and so from the state of an optimizer:
    to resume a training, use `dynsparse.training.save_checkpoint`.

    Args:
        model: the model; parameters and buffers are written, tied ones once.
        path: the file; its folder must exist.
        metadata: strings to store with the weights, such as the step.

    Raises:
        TypeError: state that is not tensors, metadata that is not strings.
        OSError: the file cannot be written; an earlier file at `path` is unchanged.
    """
    from safetensors.torch import save_file  # here: `import dynsparse` loads only torch

    state = _state_of(model)
    warn_of_active_sets(model)
    tensors, aliases = _deduplicate(pack_layers(model, state))
    check_kind("metadata", metadata, (Mapping, type(None)), "a dictionary of texts or None")
    user = dict(metadata or {})
    for key, value in user.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata must map strings to strings, got {key!r}: {value!r}")
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "layers": json.dumps(_describe_layers(model)),
        "aliases": json.dumps(aliases),
        "user": json.dumps(user),
    }
    with replace_file(Path(path)) as temporary:
        # Opened here first: a missing folder is then an OSError that names it.
        temporary.touch()
        save_file(tensors, temporary, header)


@check_types
def load_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> dict[str, str]:
    """Load a file of `save_safetensors` into `model`, whose layers are sparse as in the file.

    Everything is checked before anything is changed. The Parameter objects stay, so an existing
    optimizer remains valid; its state is not in the file (see `dynsparse.training.checkpoint`).

    Returns:
        The `metadata` of the file.

    Raises:
        ValueError: a file that is truncated, damaged, not of `save_safetensors`, or of another
            model; the message is one line on the first difference.
        OSError: the file cannot be read.
    """
    path = Path(path)
    file = read_weights(path)
    if file.layers is None:
        raise ValueError(
            f"{path} was not written by save_safetensors; dynsparse.load_pretrained reads other "
            "files"
        )
    for name in file.layers:
        values = file.tensors.get(join_names(name, "values"))
        if values is not None and values.dtype is torch.int8:
            raise ValueError(
                f"the values of {name!r} in {path} are int8, which no layer that trains can hold: "
                "use dynsparse.load_pretrained, with the dense model"
            )
    try:
        with defer_signals():
            _load(model, file.tensors, file.layers, {})
    except ValueError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from None
    return file.metadata


@check_types
def load_pretrained(model: nn.Module, folder_or_file: str | os.PathLike[str]) -> nn.Module:
    """Load a saved sparse model into `model`; layers that are sparse in the file become sparse.

    Build the model as it was before `sparsify`: dense and of the same dtype; `with
    torch.device("meta")` saves the time and the memory of its weights. Layers that are already
    sparse must have the shape and the number of blocks of the file. The Parameters of the weights
    are new, so create the optimizer afterwards. Layers whose values are int8 in the file become
    those of `quantize`, and the model is for inference then.

    Args:
        model: the model, changed in place.
        folder_or_file: a safetensors file, the index of a sharded one, or a folder with either, as
            `save_pretrained` writes it: model.safetensors.index.json, model.safetensors, or the
            only file of another name.

    Returns:
        The model.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a truncated or damaged file, or one of another model; the message is one line
            on the first difference. A folder with several files. A buffer on the meta device that
            is not part of the state. The model is then unchanged.
    """
    path = Path(folder_or_file)
    tensors, layers, _ = _read_folder(path)
    try:
        if layers is None:
            tensors = convert_names(model, tensors)
        with defer_signals():
            _load(model, tensors, layers, find_candidates(model))
    except ValueError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from None
    set_quantizers(model)
    return model


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read any safetensors file; return its metadata and its tensors."""
    import safetensors

    check_regular(path)
    path.open("rb").close()  # a missing or unreadable file is an OSError that names it
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        if zipfile.is_zipfile(path):
            raise ValueError(
                f"{path} is a file of torch.save, which may hold code: if you trust it, pass the "
                "result of torch.load to load_state_dict, or save it as safetensors first"
            ) from None
        reason = describe_error(error)
        raise ValueError(f"{path} is truncated or no safetensors file: {reason}") from None
    return header, tensors


def read_weights(path: Path) -> WeightsFile:
    """Read a safetensors file, with its layers and tied names if `save_safetensors` wrote it.

    Raises:
        ValueError: a truncated or damaged file, or one of another version of the format.
        OSError: the file cannot be read.
    """
    header, tensors = read_tensors(path)
    if header.get("format") != _FORMAT:
        return WeightsFile(tensors, None, {})
    if header.get("version") != _VERSION:
        raise ValueError(
            f"{path} has format version {str(header.get('version'))[:20]}, this dynsparse reads "
            f"version {_VERSION}: load it with the dynsparse that wrote it"
        )
    try:
        aliases = {name: tensors[key] for name, key in parse_json(header["aliases"]).items()}
        layers, user = parse_json(header["layers"]), parse_json(header["user"])
        for layer in layers.values():
            numbers = [*layer["shape"], layer["block_size"], layer["blocks"]]
            if layer.get("activations", ACTIVATIONS[0]) not in ACTIVATIONS:
                raise ValueError(f"expected activations of {' or '.join(ACTIVATIONS)}")
            if len(numbers) != 4 or not all(type(number) is int for number in numbers):
                raise ValueError(f"expected shape, block size and blocks, got {shorten(layer)}")
        if not isinstance(user, dict) or not all(isinstance(text, str) for text in user.values()):
            raise ValueError(f"expected strings by name, got {shorten(user)}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error)[:200]
        raise ValueError(f"{path} is damaged: its metadata cannot be read ({reason})") from None
    return WeightsFile(tensors | aliases, layers, user)


def _read_folder(path: Path) -> WeightsFile:
    """Read a file, the index of a sharded model, or a folder with either."""
    if path.is_dir():
        path = _find_file(path)
    if path.suffix != ".json":
        return read_weights(path)
    tensors = {}
    for file, names in _read_index(path).items():
        _, part = read_tensors(file)
        for name in names:
            if name not in part:
                raise ValueError(f"{path} says that {file.name} holds {name!r}, which it does not")
            tensors[name] = part[name]
    return WeightsFile(tensors, None, {})


def _find_file(folder: Path) -> Path:
    """Find the index or the file of a model in its folder."""
    # Libraries have names of their own, and diffusers "...safetensors.index.fp16.json".
    for pattern in (_INDEX, _FILE, "[!.]*.safetensors.index*.json", "[!.]*.safetensors"):
        files = sorted(folder.glob(pattern))
        if len(files) > 1:
            raise ValueError(
                f"the folder {folder} has several files, "
                f"{shorten([file.name for file in files])}: pass the path of one"
            )
        if files:
            return files[0]
    raise FileNotFoundError(
        f"expected a safetensors file or the index of several, such as {_FILE} or {_INDEX}, in the "
        f"folder {folder}, found neither: save with save_pretrained() or dynsparse.save_safetensors"
    )


def _read_index(path: Path) -> dict[Path, list[str]]:
    """Read the index of a sharded model: file -> the names of its tensors."""
    if path.stat().st_size > read_limit():
        raise ValueError(f"{path} is too large for an index")
    try:
        weight_map = parse_json(path.read_bytes())["weight_map"]
        names = [(name, file) for name, file in weight_map.items() if isinstance(file, str)]
        if len(names) < len(weight_map):
            raise ValueError("a file name that is not a string")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = describe_error(error)
        raise ValueError(f"{path} is no index of a sharded model: {reason}") from None
    shards: dict[Path, list[str]] = {}
    for name, file in names:
        # Files outside of the folder are not read, even if an untrusted index names them.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{path} must name safetensors files beside it, got {shorten(file)}")
        shards.setdefault(path.parent / file, []).append(name)
    return shards


def _deduplicate(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, contiguous and in separate memory, and the aliases of its names."""
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


def pack_layers(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` with packed patterns and the values of sparse layers in row-major order.

    Shared layers keep a pattern under each of their names, and share their values.
    """
    packed = dict(state)
    values_of: dict[int, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedSparseLinear):
            parts = module.pack()
            parts["values"] = values_of.setdefault(id(module), parts["values"])
            del packed[join_names(name, "row_ptr")], packed[join_names(name, "cols")]
            packed |= {join_names(name, part): tensor for part, tensor in parts.items()}
            continue
        keys = [join_names(name, part) for part in _PARTS]
        if not isinstance(module, SparseLinear) or any(key not in packed for key in keys):
            continue
        # From the state, where they are consistent: another thread may be changing the layer.
        rows, cols, values = (packed.pop(key) for key in keys)
        grid = module.pattern.grid
        flat, order = (given := rows.long() * grid[1] + cols).sort()
        if not torch.equal(flat, given):
            values = values[order.to(values.device)]
        form, pattern = pack(flat, grid[0] * grid[1])
        packed[join_names(name, form)] = pattern
        packed[keys[2]] = values_of.setdefault(id(module), values)
    return packed


def _describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (SparseLinear, QuantizedSparseLinear)):
            pattern = module.pattern
            layers[name] = {
                "shape": list(pattern.shape),
                "block_size": pattern.block_size,
                "blocks": pattern.nnz,
            }
        if isinstance(module, QuantizedSparseLinear):
            layers[name]["activations"] = module.activations
    return layers


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return `model.state_dict()`, after checking that all entries are tensors."""
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    state = model.state_dict()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"a safetensors file holds only tensors, but {name!r} of the model's state is "
                f"{type(tensor).__name__}: save the model with dynsparse.training.save_checkpoint"
            )
    return state


def _load(
    model: nn.Module,
    tensors: dict[str, Tensor],
    described: Layers | None,
    candidates: Mapping[str, Candidate],
) -> None:
    """Check everything, replace the `candidates` that are sparse in the file, and load the state.

    Args:
        model: the model, which is unchanged after an error.
        tensors: the state; tied tensors may be given once.
        described: the sparse layers according to the file, if it has a description.
        candidates: the dense layers that may become sparse.
    """
    names = _sparse_names(candidates, tensors)
    for key in [join_names(name, "weight") for name in names]:
        if key in tensors and not tensors[key].numel():
            del tensors[key]  # see `hf_quantizer`
    _share_values(candidates, names, tensors)
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear) and name not in names:
            raise ValueError(f"the layer {name!r} is not sparse in the file")
    quantized = _take_quantized(model, names, tensors)
    layers = _make_layers(model, candidates, names, tensors, described)
    loaded = {n: layer for n, layer in layers.items() if isinstance(layer, SparseLinear)}
    replaced = replace_layers(model, candidates, layers)
    try:
        for name, layer in loaded.items():
            layer._omits_pattern = True
            for part in (*_PARTS, *PACKED):  # which the layer has already
                tensors.pop(join_names(name, part), None)
        _check_state(model, tensors, names, {join_names(name, "values") for name in loaded})
        with materialize_meta_tensors(model):
            model.load_state_dict(tensors, strict=False)
            if quantized:
                _quantize_layers(model, quantized, described)
    except BaseException:
        for name, module in replaced.items():
            model.set_submodule(name, module)
        raise
    for layer in loaded.values():
        layer._omits_pattern = False
    disable_fast_paths(model)


def _take_quantized(
    model: nn.Module, names: list[str], tensors: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name -> the int8 values of a layer and their scale.

    In `tensors` they are replaced by float32 values, so that the layers are loaded as others are.
    """
    quantized: dict[str, tuple[Tensor, Tensor]] = {}
    modules = dict(model.named_modules())
    for name in names:
        values = tensors.get(join_names(name, "values"))
        if values is None or values.dtype is not torch.int8:
            continue
        scale = tensors.pop(join_names(name, "scale"), None)
        if scale is None or scale.dtype is not torch.float32 or not bool(scale.isfinite().all()):
            raise ValueError(f"the int8 values of {name!r} need a finite float32 scale in the file")
        for parameter in modules[name].parameters() if name in modules else ():
            if parameter.dtype is not torch.float32:
                raise ValueError(
                    f"the file has int8 weights, {name!r} is {parameter.dtype} in the model: load "
                    "it into a float32 model, after model.float()"
                )
        quantized[name] = values, scale
        tensors[join_names(name, "values")] = values.float()
    return quantized


def _quantize_layers(
    model: nn.Module,
    quantized: Mapping[str, tuple[Tensor, Tensor]],
    described: Layers | None,
) -> None:
    """Replace layers whose patterns and biases are loaded by layers with int8 values."""
    layers: dict[str, QuantizedSparseLinear] = {}
    shared: dict[int, QuantizedSparseLinear] = {}
    for name, (values, scale) in quantized.items():
        layer: Any = model.get_submodule(name)
        if scale.shape != (layer.out_features,) or type(layer).forward is not SparseLinear.forward:
            raise ValueError(
                f"the int8 values of {name!r} need a linear layer and a scale [out_features], got "
                f"a {type(layer).__name__} and {list(scale.shape)}"
            )
        description = {} if described is None else described.get(name, {})
        activations = description.get("activations", ACTIVATIONS[0])
        if id(layer) not in shared:
            shared[id(layer)] = QuantizedSparseLinear(
                layer.pattern, values, scale, layer.bias, activations
            )
        layers[name] = shared[id(layer)]
    replace_by_quantized(model, layers)


def load_sparse_layers(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replace the layers that `tensors` has values and patterns for by sparse layers.

    Args:
        model: the model, whose weights of these layers may be on the meta device.
        tensors: the values and patterns by name, on the device and of the dtype they shall have.

    Raises:
        ValueError: tensors that do not fit the model.
    """
    names = list(dict.fromkeys(key.rpartition(".")[0] for key in tensors))
    weights: dict[str, Any] = {name: model.get_submodule(name).weight for name in names}
    stand_ins: dict[int, nn.Parameter] = {}
    for name, weight in weights.items():
        if not has_pattern(name, tensors):
            raise ValueError(f"the sparse layer {name!r} has no pattern in the file")
        values = tensors.get(join_names(name, "values"))
        if values is not None:
            # It has the device and the dtype of the values, and memory for one element.
            full = values.new_zeros(()).expand(weight.shape)
            stand_ins[id(weight)] = nn.Parameter(full, requires_grad=weight.requires_grad)
    for name, weight in weights.items():
        if id(weight) not in stand_ins:
            raise ValueError(f"the sparse layer {name!r} has no values in the file")
    for module in model.modules():
        for part, parameter in module._parameters.items():
            module._parameters[part] = stand_ins.get(id(parameter), parameter)
    candidates = find_candidates(model)
    _share_values(candidates, names, tensors)
    layers = _make_layers(model, candidates, names, tensors, None)
    replace_layers(model, candidates, layers)
    disable_fast_paths(model)


def _sparse_names(candidates: Mapping[str, Candidate], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the sparse layers in the file; tied layers may share their values."""
    names = dict.fromkeys(key.rpartition(".")[0] for key in tensors)
    return [
        name
        for name in names
        if has_pattern(name, tensors)
        and (name in candidates or join_names(name, "values") in tensors)
    ]


def has_pattern(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the file has a pattern for the layer `name`."""
    if any(join_names(name, form) in tensors for form in PACKED):
        return True
    return join_names(name, "rows") in tensors and join_names(name, "cols") in tensors


def _share_values(
    candidates: Mapping[str, Candidate], names: list[str], tensors: dict[str, Tensor]
) -> None:
    """Add the values of tied layers, which most files have once, under all their names."""
    by_weight = {
        candidates[name].key: tensors[join_names(name, "values")]
        for name in names
        if name in candidates and join_names(name, "values") in tensors
    }
    for name in names:
        if name in candidates and candidates[name].key in by_weight:
            tensors.setdefault(join_names(name, "values"), by_weight[candidates[name].key])


def _make_layers(
    model: nn.Module,
    candidates: Mapping[str, Candidate],
    names: list[str],
    tensors: dict[str, Tensor],
    described: Layers | None,
) -> dict[str, nn.Module]:
    """Return name -> the sparse layer to put there; tied weights share one layer.

    Packed patterns of layers that are sparse already are replaced by rows and columns in `tensors`,
    as a state dict has them.
    """
    excluded = {
        n: reason
        for n, reason in default_exclusions(model, candidates).items()
        if reason not in OVERRIDABLE
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    shared: dict[tuple[int, str | None], dict[str, nn.Module]] = {}
    layers: dict[str, nn.Module] = {}
    for name in names:
        candidate = candidates.get(name)
        if candidate is None:
            module = modules.get(name)
            if isinstance(module, SparseLinear):
                pattern = read_pattern(name, tensors, module.pattern.shape, described)
                if module.block_size != pattern.block_size:
                    raise ValueError(
                        f"{name!r} has blocks of {pattern.block_size} in the file and of "
                        f"{module.block_size} in the model"
                    )
                try:
                    module._check_capacity(pattern)
                except ValueError as error:
                    raise ValueError(f"{name!r}: {error}") from None
                if any(tensors.pop(join_names(name, form), None) is not None for form in PACKED):
                    tensors |= {
                        join_names(name, "rows"): pattern.rows,
                        join_names(name, "cols"): pattern.cols,
                    }
                continue
            kind = "no such layer" if module is None else f"a {type(module).__name__} there"
            raise ValueError(f"{name!r} is a sparse layer in the file, the model has {kind}")
        check_replaceable(candidate)
        if name in excluded:
            raise ValueError(
                f"{name!r} is sparse in the file, but in the model it {excluded[name]}"
            )
        if candidate.key not in shared:
            pattern = read_pattern(name, tensors, candidate.matrix_shape, described)
            values = tensors[join_names(name, "values")]
            if values.dtype != candidate.weight.dtype:
                raise ValueError(
                    f"the values of {name!r} are {values.dtype} in the file, "
                    f"{candidate.weight.dtype} in the model: convert the model first, with "
                    "model.to(dtype)"
                )
            group = [other for other in candidates.values() if other.key == candidate.key]
            made = make_sparse_layers(group, pattern, values)
            shared[candidate.key] = made
            layers |= {n: layer for n, layer in made.items() if isinstance(layer, TiedHead)}
        layer = layers[name] = shared[candidate.key][name]
        if not isinstance(layer, SparseLinear):
            raise ValueError(f"{name!r} is sparse in the file, but in the model it shares its "
                             "weight with an embedding")  # fmt: skip
    for name, candidate in candidates.items():
        if candidate.key in shared and name not in layers:
            raise ValueError(f"the tied layer {name!r} is dense in the file, others of it sparse")
    return layers


def read_pattern(
    name: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], described: Layers | None
) -> SparsePattern:
    """Return the pattern of a sparse layer of the file, checked against its description."""
    layer = None if described is None else described.get(name)
    if layer is not None and tuple(layer["shape"]) != tuple(shape):
        raise ValueError(
            f"{name!r} has the shape {layer['shape']} in the file, {list(shape)} in the model"
        )
    if join_names(name, "values") not in tensors:
        raise ValueError(f"the sparse layer {name!r} has no values in the file")
    values = tensors[join_names(name, "values")]
    square = values.dim() == 3 and values.shape[1] == values.shape[2] >= 1
    if values.dim() != 1 and not square:
        raise ValueError(
            f"the values of {name!r} must be [nnz] or [nnz, b, b], got {list(values.shape)}"
        )
    b = 1 if values.dim() == 1 else values.shape[1]
    try:
        packed = unpack(tensors, join_names(name, ""), shape, values)
        if packed is not None:
            pattern = packed
        else:
            rows, cols = (tensors[join_names(name, part)] for part in _PARTS[:2])
            pattern = SparsePattern._from_slot_coordinates(rows, cols, shape=shape, block_size=b)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the pattern of {name!r} does not fit: {error}") from None
    if values.shape != pattern.values_shape:
        raise ValueError(
            f"the pattern of {name!r} is damaged: expected as many values as blocks, "
            f"got {pattern.nnz} blocks and values of the shape {list(values.shape)}"
        )
    if layer is not None and (layer["block_size"], layer["blocks"]) != (b, pattern.nnz):
        raise ValueError(
            f"the pattern of {name!r} is damaged: expected {layer['blocks']} blocks of "
            f"{layer['block_size']}, got {pattern.nnz} of {b}"
        )
    return pattern


def _check_state(
    model: nn.Module, tensors: Mapping[str, Tensor], names: list[str], loaded: Set[str]
) -> None:
    """Check that the tensors fit the model, key by key; tied tensors may be given once.

    Args:
        names: the sparse layers, whose patterns are checked already.
        loaded: keys of the state that the model has from the file already.
    """
    state: dict[str, Any] = _state_of(model)
    parts = {join_names(name, part) for name in names for part in _PARTS}
    given = {_memory_key(state[name]) for name in tensors if name in state}
    for name in sorted(tensors.keys() - state.keys()):
        raise ValueError(f"{name!r} is only in the file")
    for name, tensor in state.items():
        other = tensors.get(name)
        if name in loaded:
            continue
        if other is None:
            if _memory_key(tensor) not in given or not tensor.numel():
                raise ValueError(f"{name!r} is only in the model")
        elif other.dtype != tensor.dtype or (other.shape != tensor.shape and name not in parts):
            raise ValueError(
                f"{name!r} is {other.dtype} {list(other.shape)} in the file, "
                f"{tensor.dtype} {list(tensor.shape)} in the model"
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in state:
            raise ValueError(
                f"the buffer {name!r} is on the meta device and not in the file: build the model "
                "outside of torch.device('meta')"
            )


def _memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same memory, shape and dtype."""
    address = tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
