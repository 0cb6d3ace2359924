"""Sparse layers with int8 weights beside float32, and beside onnxruntime's dense int8.

    python benchmarks/int8_inference.py [--density 0.1] [--rounds 15] [--json FILE]

Layers of BERT base, one thread. onnxruntime computes the dense layer as its
`quantize_dynamic` writes it (MatMulInteger, activations quantized at run time). "one layer" is
called repeatedly, so its weights stay in the caches if they fit; "many layers", 60 MB of float32
values in all, are called one after another, as in a model. Prints onnxruntime's time over that of
each kind of sparse layer: the median and quartiles of the ratios of the rounds. Times are the
thread's CPU time, so other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor

from dynsparse.bench.timing import spread
from dynsparse.nn import QuantizedSparseLinear, SparseLinear

SHAPES = {"768 -> 768": (768, 768), "768 -> 3072": (768, 3072), "3072 -> 768": (3072, 768)}
BLOCKS = (1, 4, 16)
BATCHES = (1, 8, 128)
MANY = 60e6

Run = Callable[[Tensor], Any]


def dense_int8(in_features: int, out_features: int, folder: Path, count: int) -> list[Run]:
    """Sessions of a dense layer quantized by onnxruntime."""
    weight = np.random.default_rng(0).standard_normal((in_features, out_features), np.float32)
    sizes = {"x": in_features, "y": out_features}
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", s]) for n, s in sizes.items())
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])],
        "layer",
        [x],
        [y],
        [
            numpy_helper.from_array(weight / 30, "w"),
            numpy_helper.from_array(np.zeros(out_features, np.float32), "b"),
        ],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "dense.onnx")
    quantize_dynamic(folder / "dense.onnx", folder / "int8.onnx", weight_type=QuantType.QInt8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = [onnxruntime.InferenceSession(folder / "int8.onnx", options) for _ in range(count)]
    return [lambda x, s=session: s.run(None, {"x": x.numpy()}) for session in sessions]


def layers(
    in_features: int, out_features: int, density: float, block: int, count: int
) -> dict[str, list[Run]]:
    floats = [
        SparseLinear(in_features, out_features, density, block).eval().requires_grad_(False)
        for _ in range(count)
    ]
    kinds: dict[str, list[Run]] = {"float32": list(floats)}
    kinds["int8 weights"] = [QuantizedSparseLinear.from_float(layer) for layer in floats]
    if block % 8 == 0:
        kinds["int8 both"] = [QuantizedSparseLinear.from_float(layer, "int8") for layer in floats]
    return kinds


def compare(runs: dict[str, list[Run]], x: Tensor, rounds: int) -> dict[str, Sequence[float]]:
    """Times of "onnxruntime" over those of the others: quartiles over rounds."""
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        times = {}
        for name, calls in runs.items():
            if len(calls) == 1:
                calls[0](x)
            begin = time.thread_time_ns()
            for call in calls if len(calls) > 1 else calls * 5:
                call(x)
            times[name] = time.thread_time_ns() - begin
        if number:
            for name, ratio in ratios.items():
                ratio.append(times["onnxruntime"] / times[name])
    del ratios["onnxruntime"]
    spreads = {name: spread(ratio) for name, ratio in ratios.items()}
    return {name: (s.low, s.median, s.high) for name, s in spreads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, Sequence[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (in_features, out_features) in SHAPES.items():
            many = int(MANY / (in_features * out_features * given.density * 4))
            for count in (1, many):
                dense = dense_int8(in_features, out_features, Path(folder), count)
                for block in BLOCKS:
                    kinds = layers(in_features, out_features, given.density, block, count)
                    for batch in BATCHES:
                        x = torch.randn(batch, in_features)
                        key = f"{name}, blocks of {block}, {batch} samples, " + (
                            "one layer" if count == 1 else "many layers"
                        )
                        rounds = given.rounds if count == 1 else max(2, given.rounds // 3)
                        results[key] = compare(kinds | {"onnxruntime": dense}, x, rounds)
                        shown = ", ".join(
                            f"{kind} {middle:.2f} ({low:.2f} to {high:.2f})"
                            for kind, (low, middle, high) in results[key].items()
                        )
                        print(f"{key}: {shown}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
