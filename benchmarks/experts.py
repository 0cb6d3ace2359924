"""The experts of a Mixtral: sparse ones beside those of transformers, one module alone.

    python benchmarks/experts.py [--threads 1] [--json experts.json]

8 experts of 1,024 and 2,048 features, two for each of 512 tokens, float32, with their router. The
reference are the dense experts of the package transformers as it computes them by default (one
grouped product); "split" are the same as one `nn.Linear` each. A step is the forward pass and all
gradients. Contenders take turns; ratios are those of each round.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path

import torch
from models import _transformers
from torch import nn

import dynsparse as ds
from dynsparse.bench.timing import Effort, measure

DENSITIES = (0.05, 0.1, 0.2)


def make_contenders() -> dict[str, nn.Module]:
    library = _transformers()
    torch.manual_seed(0)
    config = library.MixtralConfig(
        vocab_size=100,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    dense = library.MixtralForCausalLM(config).model.layers[0].mlp
    contenders = {"dense": dense, "split": ds.nn.split_experts(copy.deepcopy(dense))}
    for density in DENSITIES:
        split = copy.deepcopy(contenders["split"])
        ds.sparsify(split, density, start="magnitude", allocation="uniform", verbose=False)
        contenders[f"density {density:g}"] = split
    return contenders


def compare(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Contender -> median and quartiles of the dense time over its own."""
    timing = measure(works, "dense", Effort(seconds=0, rounds=rounds))
    return {name: [1 / s.median, 1 / s.high, 1 / s.low] for name, s in timing.ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contenders = make_contenders()
    x = torch.randn(2, 256, 1024, requires_grad=True)

    def step(module: nn.Module) -> None:
        module(x).sum().backward()
        module.zero_grad()

    @torch.no_grad()
    def forward(module: nn.Module) -> None:
        module(x)

    results = {
        what: compare(
            {name: lambda m=module, work=work: work(m) for name, module in contenders.items()},
            options.rounds,
        )
        for what, work in (("step", step), ("forward", forward))
    }
    for what, ratios in results.items():
        for name, (median, low, high) in ratios.items():
            print(f"{what}, {name}: {median:.2f} ({low:.2f} to {high:.2f}) times as fast as dense")
    if options.json is not None:
        options.json.write_text(json.dumps({"threads": options.threads, **results}))


if __name__ == "__main__":
    main()
