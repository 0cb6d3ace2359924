"""onnxruntime with the sparse operator beside onnxruntime with dense matrices.

    python benchmarks/onnxruntime_inference.py [--threads 2] [--rounds 21] [--json FILE]

Layers of BERT base with 1, 128 and 1,024 samples (a token, a sequence of 128, eight of them), and
a six-layer encoder of the same shape, as in DistilBERT. Sessions run in turn in one process with
the same threads. Prints the speed-up over dense: median and quartiles of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dynsparse as ds
from dynsparse.bench.timing import Effort, measure
from dynsparse.integrations.onnx import export
from dynsparse.integrations.onnxruntime import register

LAYERS = {"768 -> 768": (768, 768), "768 -> 3072": (768, 3072), "3072 -> 768": (3072, 768)}
KINDS = {
    "elements 0.2": (0.2, 1),
    "elements 0.1": (0.1, 1),
    "blocks of 16 0.2": (0.2, 16),
    "blocks of 16 0.1": (0.1, 16),
}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def session(model: nn.Module, x: torch.Tensor, weights: str, threads: int, folder: str) -> Any:
    import onnxruntime

    file = Path(folder) / "model.onnx"
    dimensions = ({0: "batch"},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(model.eval(), (x,), file, weights=weights, dynamic_shapes=dimensions)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    register(options)
    made = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = made.get_inputs()[0].name
    return lambda value: made.run(None, {name: value})


def sessions(build: Any, x: torch.Tensor, threads: int, folder: str) -> dict[str, Any]:
    """Sessions of dense and each kind of sparse; checks the sparse ones against torch."""
    runs: dict[str, Any] = {}
    for name, (density, block) in KINDS.items():
        torch.manual_seed(0)
        model = ds.sparsify(
            build(), density, block, allocation="uniform", include="*", verbose=False
        )
        runs[name] = session(model, x, "operator", threads, folder)
        (y,) = runs[name](x.numpy())
        with torch.no_grad():
            expected = model(x).numpy()
        if not np.allclose(y, expected, rtol=1e-3, atol=1e-3):
            raise SystemExit(f"{name}: onnxruntime computes something else than torch")
        if "dense" not in runs:
            runs["dense"] = session(model, x, "dense", threads, folder)
    return runs


def compare(runs: dict[str, Any], x: np.ndarray, rounds: int) -> dict[str, list[float]]:
    """Times of dense over those of each kind: quartiles over rounds."""
    works = {name: partial(run, x) for name, run in runs.items()}
    ratios = measure(works, "dense", Effort(seconds=0, rounds=rounds)).ratios
    return {name: [1 / s.high, 1 / s.median, 1 / s.low] for name, s in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def measure(name: str, runs: dict[str, Any], x: np.ndarray) -> None:
            results[name] = compare(runs, x, given.rounds)
            shown = ", ".join(
                f"{kind} {middle:.2f} ({low:.2f} to {high:.2f})"
                for kind, (low, middle, high) in results[name].items()
            )
            print(f"{name}: {shown}", flush=True)

        for name, (in_, out) in LAYERS.items():
            runs = sessions(
                lambda i=in_, o=out: nn.Sequential(nn.Linear(i, o)),
                torch.randn(2, in_),
                given.threads,
                folder,
            )
            for batch in (1, 128, 1024):
                x = np.random.default_rng(0).standard_normal((batch, in_), np.float32)
                measure(f"{name}, {batch} samples", runs, x)
        runs = sessions(encoder, torch.randn(2, 128, 768), given.threads, folder)
        for batch in (1, 8):
            x = np.random.default_rng(0).standard_normal((batch, 128, 768), np.float32)
            measure(f"encoder of six layers, {batch} x 128", runs, x)
    if given.json:
        given.json.write_text(
            json.dumps({"threads": given.threads, "over dense": results}, indent=1)
        )


if __name__ == "__main__":
    main()
