"""Training steps of dynsparse beside those of other libraries that store only nonzero weights.

    python benchmarks/peers.py [--threads 1] [--json FILE] [--no-gpt]

Layers: forward, and the gradients of input, weights and bias, with the same weights in all:
sparselab's and SparseProp's layers, torch's CSR products, a masked layer under `torch.compile`, and
a dense one. A library is skipped, with a message, if its results differ from float64 or it is not
installed (`pip install sparselab`; SparseProp from its repository).

GPT: sparselab's demo with 40 million weights (eight blocks of 640 features, projections of
attention at density 0.3, feed-forward at 0.1, SGD, 8 sequences of 128 characters), with the same
weights in both libraries. Reports the time of a step, the memory of a process, and the loss after
the same steps.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynsparse as ds
from dynsparse.bench.cells import Cell
from dynsparse.bench.contenders import (
    MaskedLinear,
    MklLinear,
    build_layer,
    dense_layer,
    step_of,
)
from dynsparse.bench.timing import Effort, measure

FEATURES = (384, 1024, 2048, 4096)
DENSITIES = (0.1, 0.05, 0.02, 0.01)
BATCHES = (128, 1024)

Maker = Callable[[ds.nn.SparseLinear], nn.Module]


def sparselab_layer(layer: ds.nn.SparseLinear) -> nn.Module:
    """sparselab's layer with the same weights."""
    import sparselab

    twin = sparselab.SparseLinear(
        layer.in_features, layer.out_features, bias=layer.bias is not None
    )
    twin._csr = sparselab.layout.from_dense(layer.to_dense().detach(), padding_ratio=0.2)
    twin._values = nn.Parameter(torch.from_numpy(np.asarray(twin._csr.values)))
    if layer.bias is not None:
        twin.bias = nn.Parameter(layer.bias.detach().clone())
    return twin


def sparseprop_layer(layer: ds.nn.SparseLinear) -> nn.Module:
    """SparseProp's layer with the same weights."""
    from sparseprop.modules.linear import SparseLinear

    assert layer.bias is not None
    return SparseLinear(layer.to_dense().detach(), nn.Parameter(layer.bias.detach().clone()))


def compiled_masked_layer(layer: ds.nn.SparseLinear) -> nn.Module:
    """A dense weight times a mask, compiled."""
    torch.compiler.reset()
    return torch.compile(MaskedLinear(layer), dynamic=False)


PEERS: dict[str, Maker] = {
    "sparselab": sparselab_layer,
    "SparseProp": sparseprop_layer,
    "torch CSR": MklLinear,
    "masked, compiled": compiled_masked_layer,
    "dense": dense_layer,
}


def largest_error(module: nn.Module, layer: ds.nn.SparseLinear, x: Tensor, dy: Tensor) -> float:
    """Error of outputs and input gradients, relative to the largest float64 value."""
    weight, bias = layer.to_dense().detach().double(), layer.bias.detach().double()
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    expected = (x.detach().double() @ weight.t() + bias, dy.double() @ weight)
    return max(
        ((result.detach() - right).abs().max() / right.abs().max()).item()
        for result, right in zip((y, dx), expected, strict=True)
    )


def compare_layers(threads: int, effort: Effort) -> list[dict[str, Any]]:
    """A row per size, density and batch: times relative to dynsparse."""
    rows = []
    for features, density, batch in itertools.product(FEATURES, DENSITIES, BATCHES):
        cell = Cell((features, features), batch, density, threads=threads)
        layer, x, dy = build_layer(cell)
        modules, excluded = {"dynsparse": layer}, {}
        for name, make in PEERS.items():
            try:
                module = make(layer)
            except ImportError as error:
                excluded[name] = f"not installed: {error}"
                continue
            error = largest_error(module, layer, x, dy)
            if error < 1e-4:
                modules[name] = module
            else:
                excluded[name] = f"wrong: an error of {error:.1e}"
        works = {name: step_of(module, x, dy) for name, module in modules.items()}
        timing = measure(works, "dynsparse", effort)
        ratios = {n: [r.low, r.median, r.high] for n, r in timing.ratios.items()}
        rows.append(
            {
                "features": features,
                "density": density,
                "batch": batch,
                "ratios": ratios,
                "excluded": excluded,
                "foreign": timing.foreign,
            }
        )
        shown = ", ".join(
            f"{name} {median:.2f} ({low:.2f} to {high:.2f})"
            for name, (low, median, high) in ratios.items()
        )
        print(f"{cell}: {shown}; {excluded or ''}", flush=True)
    return rows


# The GPT.

WIDTH, HEADS, DEPTH, LENGTH, SEQUENCES = 640, 10, 8, 128, 8


def sparse_linear(in_features: int, out_features: int, density: float) -> nn.Module:
    return ds.nn.SparseLinear(in_features, out_features, density=density, bias=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = sparse_linear(WIDTH, 3 * WIDTH, 0.3), sparse_linear(WIDTH, WIDTH, 0.3)
        self.up, self.down = (
            sparse_linear(WIDTH, 4 * WIDTH, 0.1),
            sparse_linear(4 * WIDTH, WIDTH, 0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """Logits of the next character."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        return self.head(self.blocks(x))


def build_gpt(name: str, tokens: int) -> nn.Module:
    """The same weights for every name."""
    torch.manual_seed(0)
    model = Gpt(tokens)
    if name != "dynsparse":
        make = {"sparselab": sparselab_layer, "dense": dense_layer}[name]
        for block in model.blocks[:DEPTH]:
            for part, layer in list(block.named_children()):
                if isinstance(layer, ds.nn.SparseLinear):
                    setattr(block, part, make(layer))
    return model


class Training:
    """Trains a model by SGD on random pieces of a text; the step number seeds the choice."""

    def __init__(self, name: str, text: Tensor) -> None:
        self.model = build_gpt(name, int(text.max()) + 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=3e-3)
        self.text, self.steps = text, 0
        self.loss = float("nan")

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        starts = torch.randint(len(self.text) - LENGTH, (SEQUENCES, 1), generator=generator)
        pieces = self.text[starts + torch.arange(LENGTH + 1)]
        self.optimizer.zero_grad()
        logits = self.model(pieces[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.loss, self.steps = loss.item(), self.steps + 1


def read_text(file: Path | None) -> Tensor:
    """Characters of a text as numbers; without a file, of the docstrings of `str`."""
    text = file.read_text() if file else "\n".join(str(v.__doc__) for v in vars(str).values())
    numbers = {character: n for n, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text])


def peak_memory(name: str, file: Path | None, threads: int) -> int:
    """Peak bytes of a fresh process in three steps, above those after all imports."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[4]); import memory, peers\n"
        "import sparselab\n"
        "peers.torch.set_num_threads(int(sys.argv[3]))\n"
        "before = memory.resident('VmRSS')\n"
        "training = peers.Training(sys.argv[1], "
        "peers.read_text(peers.Path(sys.argv[2]) if sys.argv[2] else None))\n"
        "for _ in range(3): training.step()\n"
        "print(memory.resident('VmHWM') - before)"
    )
    words = [name, str(file or ""), str(threads), str(Path(__file__).parent)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env=environment,
    )
    return int(done.stdout)


def compare_gpt(threads: int, effort: Effort, file: Path | None, steps: int) -> dict[str, Any]:
    text = read_text(file)
    names = ["dynsparse", "sparselab", "dense"]
    trainings = {name: Training(name, text) for name in names}
    timing = measure({n: t.step for n, t in trainings.items()}, "dynsparse", effort)
    for training in trainings.values():
        while training.steps < steps:
            training.step()
    memory = {name: peak_memory(name, file, threads) for name in names}
    result = {
        "step over dynsparse": {n: [r.low, r.median, r.high] for n, r in timing.ratios.items()},
        "peak memory over dynsparse": {n: memory[n] / memory["dynsparse"] for n in names},
        f"loss of step {steps}": {n: t.loss for n, t in trainings.items()},
    }
    print(json.dumps(result, indent=1), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="least time per cell")
    parser.add_argument("--text", type=Path, help="a text to train the GPT on")
    parser.add_argument("--steps", type=int, default=50, help="steps of the GPT")
    parser.add_argument("--no-gpt", action="store_true")
    parser.add_argument("--no-layers", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(arguments.threads):
        # Each library may bring its own OpenMP, which reads this when loaded.
        environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    torch.set_num_threads(arguments.threads)
    effort = Effort(seconds=arguments.seconds)
    results: dict[str, Any] = {"threads": arguments.threads, "versions": {}}
    for package in ("dynsparse", "sparselab", "sparseprop", "torch"):
        try:
            results["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            results["versions"][package] = None
    if not arguments.no_layers:
        results["layers"] = compare_layers(arguments.threads, effort)
    if results["versions"]["sparselab"] is None:
        print("the GPT is left out: sparselab is not installed")
    elif not arguments.no_gpt:
        results["gpt"] = compare_gpt(arguments.threads, effort, arguments.text, arguments.steps)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
