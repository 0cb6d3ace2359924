"""Training steps of Nerva's network for CIFAR-10, in Nerva, dynsparse and dense.

    python benchmarks/nerva.py --module FOLDER --mkl FOLDER [--threads 1] [--json FILE]

Layers 3072-1024-1024-10 with ReLU, batches of 100, cross-entropy, SGD with Nesterov's momentum 0.9:
the network of `scripts/cifar10.sh` of https://github.com/wiegerw/nerva-rowwise, with the layer
densities that Nerva chooses. The last layer is dense: Nerva's sparse layers without an activation
have no weights. A step is forward, backward and the optimizer's step.

Build the module first, in `src` of that repository, with the headers of Eigen, fmt, pybind11 and
oneMKL (`pip install pybind11 mkl-devel`), and `-I` for each:

    g++ -std=c++17 -O3 -march=native -fopenmp -fPIC -shared -DNDEBUG -DEIGEN_USE_MKL_ALL=1 \
        -DMKL_ILP64 -DFMT_HEADER_ONLY -DVERSION_INFO=0.3 python-bindings.cpp logger.cpp \
        utilities.cpp -o FOLDER/nervalibrowwise.so

Nerva runs in its own process, since its oneMKL conflicts with torch's; the two take turns. Its
outputs and weight gradients are compared with float64 first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (3072, 1024, 1024, 10)
BATCH = 100
DENSITIES = (0.1, 0.05, 0.02, 0.01)  # of the whole network
MKL = ("mkl_intel_ilp64.so.3", "mkl_intel_thread.so.3", "mkl_core.so.3", "iomp5.so")


def data() -> tuple[np.ndarray, np.ndarray]:
    """A batch and its labels."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((BATCH, SIZES[0]), np.float32), rng.integers(SIZES[-1], size=BATCH)


# Nerva's process: prints the densities of the layers and the largest error; then, for each line of
# input, takes a step and prints an empty line.


def nerva_worker(density: float, threads: int) -> None:
    import nervalibrowwise as nerva

    nerva.set_num_threads(threads)
    densities = [*nerva.compute_sparse_layer_densities(density, list(SIZES), 1.0)[:-1], 1.0]

    def build(optimizer: str) -> Any:
        network = nerva.MLP()
        for i, layer_density in enumerate(densities):
            how = ("ReLU" if i < len(densities) - 1 else "Linear", "Xavier", optimizer)
            if layer_density < 1:
                make, more = nerva.make_sparse_linear_layer, (layer_density,)
            else:
                make, more = nerva.make_dense_linear_layer, ()
            network.append_layer(make(SIZES[i], SIZES[i + 1], BATCH, *more, *how))
        return network

    x, classes = data()
    loss, wanted = nerva.softmax_cross_entropy_loss(), np.eye(SIZES[-1], dtype=np.float32)[classes]
    print(json.dumps({"densities": densities, "error": error_of(build("GradientDescent"), x)}))
    network = build("Nesterov(0.9)")

    def step() -> None:
        y = network.feedforward(x)
        network.backpropagate(y, loss.gradient(y, wanted) / BATCH)
        network.optimize(0.01)

    sys.stdout.flush()
    for _ in sys.stdin:
        step()
        print(flush=True)


def error_of(network: Any, x: np.ndarray) -> float:
    """Largest error of outputs and weight gradients, relative to the largest float64 value."""
    weights, biases = network.weights(), network.bias()
    inputs = [x.astype(np.float64)]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        y = inputs[-1] @ weight.T.astype(np.float64) + bias
        inputs.append(y.clip(0) if i < len(weights) - 1 else y)
    found = network.feedforward(x)
    errors = [np.abs(found - inputs[-1]).max() / np.abs(inputs[-1]).max()]
    dy = np.random.default_rng(1).standard_normal(found.shape, np.float32)
    network.backpropagate(found, dy)
    network.optimize(1.0)
    for weight, new, before in reversed(
        list(zip(weights, network.weights(), inputs[:-1], strict=True))
    ):
        gradient = (dy.T @ before) * (weight != 0)
        errors.append(np.abs(gradient - (weight - new)).max() / np.abs(gradient).max())
        dy = (dy @ weight.astype(np.float64)) * (before > 0)
    return float(max(errors))


class NervaProcess:
    """Runs Nerva's steps; `facts` is its first line of output."""

    def __init__(self, density: float, arguments: argparse.Namespace) -> None:
        libraries = [str(arguments.mkl / f"lib{name}") for name in MKL]
        environment = os.environ | {
            "PYTHONPATH": str(arguments.module),
            "LD_PRELOAD": ":".join(libraries),
            "LD_LIBRARY_PATH": str(arguments.mkl),
            "OMP_NUM_THREADS": str(arguments.threads),
        }
        command = [sys.executable, __file__, "--worker", str(density)]
        command += ["--threads", str(arguments.threads)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        line = self._from.readline()
        if not line:
            raise SystemExit(f"Nerva ended with status {self._process.wait()}")
        self.facts = json.loads(line)

    def step(self) -> None:
        self._to.write("\n")
        self._to.flush()
        if not self._from.readline():
            raise RuntimeError(f"Nerva ended with status {self._process.wait()}")

    def close(self) -> None:
        self._to.close()
        self._process.wait()


def torch_step(densities: list[float]) -> Callable[[], None]:
    """A step of the same network with layers of these densities."""
    import torch
    from torch import nn

    import dynsparse as ds

    layers: list[nn.Module] = []
    for i, density in enumerate(densities):
        wide = (SIZES[i], SIZES[i + 1])
        layers += [ds.nn.SparseLinear(*wide, density) if density < 1 else nn.Linear(*wide)]
        layers += [nn.ReLU()]
    network = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    x, classes = map(torch.from_numpy, data())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), classes).backward()
        optimizer.step()

    return step


def compare(density: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times of a step over those of dynsparse: lower quartile, median, upper quartile."""
    from dynsparse.bench.timing import Effort, measure

    nerva = NervaProcess(density, arguments)
    if nerva.facts["error"] > 1e-4:
        raise SystemExit(f"Nerva computes something else: an error of {nerva.facts['error']:.1e}")
    densities = nerva.facts["densities"]
    works = {
        "dynsparse": torch_step(densities),
        "Nerva": nerva.step,
        "dense": torch_step([1.0] * len(densities)),
    }
    # Otherwise Nerva's process would count as foreign load.
    effort = Effort(seconds=arguments.seconds, foreign=1)
    ratios = measure(works, "dynsparse", effort).ratios
    nerva.close()
    row = {"density": density, "layers": densities}
    row["ratios"] = {name: [r.low, r.median, r.high] for name, r in ratios.items()}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--module", type=Path, help="the folder of nervalibrowwise")
    parser.add_argument("--mkl", type=Path, help="the folder of oneMKL's libraries")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="least time per density")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        nerva_worker(arguments.worker, arguments.threads)
        return
    if arguments.module is None or arguments.mkl is None:
        parser.error("--module and --mkl are needed: Nerva is on no package index")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    rows = [compare(density, arguments) for density in DENSITIES]
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": arguments.threads, "steps": rows}))


if __name__ == "__main__":
    main()
