"""Inference of a whole ONNX model in onnxruntime: with sparse linear layers, against dense.

What runs in turn, of the same weights:

    sparse        float32, linear layers by the operator of `dynsparse.integrations.onnxruntime`
    sparse int8   the same with weights in int8, and activations where blocks are multiples of 8
    dense         float32, onnxruntime's own products of matrices with their zeros
    dense int8    onnxruntime's `quantize_dynamic` of these
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynsparse._core.checks import shorten
from dynsparse._core.files.limits import check_regular
from dynsparse.bench.host import describe_host
from dynsparse.bench.timing import Effort, Timing, measure
from dynsparse.integrations.onnx import sparsify_onnx
from dynsparse.integrations.onnx.graph import (
    densify_initializers,
    find_linear_weights,
    ignore_warnings,
    import_library,
    make_layer,
    read_model,
    store_weights,
    to_tensor,
    transpose_pattern,
    write_model,
)
from dynsparse.integrations.onnxruntime import register
from dynsparse.nn.quantized import QuantizedSparseLinear

Files = dict[str, Path]

REFERENCE = "sparse"

_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


def time_model(
    file: Path,
    *,
    density: float | None = None,
    block_size: int = 1,
    batches: Sequence[int] = (1, 8),
    sequence: int = 128,
    threads: int = 1,
    effort: Effort | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Time the inference of a model with sparse linear layers against dense ones.

    Args:
        file: an ONNX file with the weights in the form "sparse"; with `density`, of any exporter.
        density: keep so many of the largest weights of the linear layers first, as `sparsify_onnx`
            does; None takes the file as it is.
        block_size: of the blocks that are kept.
        batches: sizes of the first dimension of the inputs, where it is dynamic.
        sequence: the size of their other dynamic dimensions.
        threads: of each session.
        effort: how long to measure each batch.
        tell: called with a line for each batch.

    Returns:
        "machine"; "layers": weight -> its density; "bytes": the sizes of the files; "batches":
        batch -> its `Timing`, and the "difference" of the sparse model's outputs from the dense
        one's, as a share of their largest magnitude.

    Raises:
        ImportError: onnx or onnxruntime is missing.
        ValueError: not an ONNX file, one without sparse weights where `density` is None, an input
            of a dtype that is neither float32 nor an integer, or sizes that the model cannot take.
        OSError: a file cannot be read, or there is no library of the operator.
    """
    check_regular(file)
    import_library("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        files, layers = _write_variants(file, Path(folder), density, block_size)
        sizes = {name: written.stat().st_size for name, written in files.items()}
        sessions = {name: _make_session(written, threads) for name, written in files.items()}
    results: dict[str, Any] = {
        "machine": describe_host(),
        "threads": threads,
        "layers": layers,
        "bytes": sizes,
        "batches": {},
    }
    shares = ", ".join(f"{name} {size / sizes['dense']:.3f}" for name, size in sizes.items())
    kept = ", ".join(sorted({f"{share:.3g}" for share in layers.values()}))
    tell(f"{len(layers)} sparse layers of density {kept}; files over dense: {shares}")
    for batch in dict.fromkeys(batches):
        feed = _make_inputs(sessions["dense"], batch, sequence)
        timing, difference = _measure(sessions, feed, effort or Effort())
        results["batches"][batch] = {**asdict(timing), "difference": difference}
        ratios = ", ".join(
            f"{name} {ratio.median:.2f}x [{ratio.low:.2f}-{ratio.high:.2f}]"
            for name, ratio in timing.ratios.items()
        )
        note = "; DISTURBED by other programs" if timing.disturbed else ""
        tell(f"  batch {batch}: {ratios}; outputs differ by {difference:.1e}{note}")
    return results


def _write_variants(
    file: Path, folder: Path, density: float | None, block_size: int
) -> tuple[Files, dict[str, float]]:
    """The files of all variants, and each sparse layer's density."""
    source = file
    if density is not None:
        source = folder / "source.onnx"
        sparsify_onnx(file, source, density, block_size=block_size)
    files = {name: folder / f"{name}.onnx" for name in (REFERENCE, "sparse int8", "dense")}
    model = read_model(source)
    patterns = densify_initializers(model)
    linear = find_linear_weights(model.graph)
    patterns = {name: pattern for name, pattern in patterns.items() if name in linear}
    if not patterns:
        raise ValueError(
            f"{file} has no sparse linear layers: give a density to keep the largest weights, or "
            'write it with export(..., weights="sparse")'
        )
    write_model(model, files["dense"])
    quantized = {}
    for entry in model.graph.initializer:
        if (pattern := patterns.get(entry.name)) is not None:
            weight = to_tensor(entry)
            if linear[entry.name].transposed:
                weight, pattern = weight.T.contiguous(), transpose_pattern(pattern)
            layer = make_layer(weight, pattern, None)
            quantized[entry.name] = QuantizedSparseLinear.from_float(layer, "int8")
    for name, layers in ((REFERENCE, None), ("sparse int8", quantized)):
        model = read_model(files["dense"])
        store_weights(model, patterns, "operator", layers)
        write_model(model, files[name])
    files["dense int8"] = folder / "dense int8.onnx"
    _quantize_densely(files["dense"], files["dense int8"])
    return files, {name: pattern.density for name, pattern in patterns.items()}


def _quantize_densely(source: Path, target: Path) -> None:
    with ignore_warnings():
        quantization = import_library("onnxruntime.quantization")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it asks for a preparation that our files do not need
    try:
        quantization.quantize_dynamic(source, target, weight_type=quantization.QuantType.QInt8)
    finally:
        logging.disable(before)


def _make_session(file: Path, threads: int) -> Any:
    onnxruntime = import_library("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    register(options)
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _make_inputs(session: Any, batch: int, sequence: int) -> dict[str, np.ndarray[Any, Any]]:
    """Normal numbers for floats; ones, which are tokens and masks, for integers and booleans."""
    generator = np.random.default_rng(0)
    feed: dict[str, np.ndarray[Any, Any]] = {}
    for value in session.get_inputs():
        shape = [
            size if isinstance(size, int) else (sequence if place else batch)
            for place, size in enumerate(value.shape)
        ]
        if value.type == "tensor(float)":
            feed[value.name] = generator.standard_normal(shape, np.float32)
        elif value.type in ("tensor(int64)", "tensor(int32)", "tensor(bool)"):
            feed[value.name] = np.ones(shape, _TYPES.get(value.type, np.bool_))
        else:
            raise ValueError(
                f"the input {value.name!r} is a {value.type}: only float32, int32, int64 and bool "
                "are supported"
            )
    return feed


def _measure(
    sessions: dict[str, Any], feed: dict[str, np.ndarray[Any, Any]], effort: Effort
) -> tuple[Timing, float]:
    try:
        dense = sessions["dense"].run(None, feed)
        sparse = sessions[REFERENCE].run(None, feed)
    except Exception as error:  # onnxruntime's have no common class
        shapes = {name: list(array.shape) for name, array in feed.items()}
        raise ValueError(
            f"the model cannot take inputs of the shapes {shapes}: {shorten(str(error))}"
        ) from None
    difference = 0.0
    for mine, other in zip(sparse, dense, strict=True):
        if mine.size and np.issubdtype(mine.dtype, np.floating):
            scale = max(float(np.abs(other).max()), torch.finfo(torch.float32).tiny)
            difference = max(difference, float(np.abs(mine - other).max()) / scale)
    work = {
        name: lambda session=session: session.run(None, feed) for name, session in sessions.items()
    }
    return measure(work, REFERENCE, effort), difference
