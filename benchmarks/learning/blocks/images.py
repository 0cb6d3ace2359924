"""Large blocks in the networks on MNIST: one training per variant and seed, a line of JSON each.

    python benchmarks/learning/blocks/images.py --data-dir DIR --network mlp --block 16 \
        --variants plain "tiles, rounded down" --output results.jsonl

--block 1 with the variant plain is elements. The trainings are shorter than the defaults of
`dynsparse mnist` and `dynsparse mnist-transformer`; --updates sets the pattern updates per epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cuts import by_correlation, dealt_out
from torch import Tensor

from dynsparse.apps.image_classification import Training, mnist, transformer
from dynsparse.apps.image_classification.mnist import (
    MnistTraining,
    arrange_pixels,
    pixel_permutation,
)
from dynsparse.apps.image_classification.run import density
from dynsparse.apps.image_classification.transformer import TransformerTraining
from dynsparse.data import DataSet, LabelledImages, load

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rounded down": {"prune_rounding": "down"},
    "tiles": {"permute_input": "block"},
    "correlated": {"permute_input": "random"},  # make() replaces the random order
    "dealt": {"permute_input": "random"},
    "interleaved": {"interleave_heads": True},
    "matching": {"match_blocks": True},
}


def make(arguments: argparse.Namespace, data: DataSet, seed: int, name: str) -> Training:
    flags: dict[str, Any] = {}
    for part in name.split(", "):
        flags |= FLAGS[part]
    common = {
        "dataset": "mnist",
        "block_size": arguments.block,
        "epochs": arguments.epochs,
        "steps_per_epoch": arguments.updates,
        **flags,
    }
    if arguments.network == "row transformer":
        options = transformer.Options(hidden_length=128, ff_length=64, **common)
        return TransformerTraining(options, data, seed)

    def permutation(kind: str, block: int, generator: torch.Generator) -> Tensor:
        natural = pixel_permutation("none", block, generator)
        if "dealt" in name:
            return dealt_out(arrange_pixels(data.train.images, natural), block)
        return by_correlation(arrange_pixels(data.train.images[:4000], natural), block)

    options = mnist.Options(densities=(0.1, 1.0), **common)
    if options.permute_input != "random":
        return MnistTraining(options, data, seed)
    with patch("dynsparse.apps.image_classification.mnist.pixel_permutation", permutation):
        return MnistTraining(options, data, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--network", choices=["mlp", "row transformer"], required=True)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--images", type=int, default=60_000, help="training images")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--updates", type=int, default=10, help="pattern updates per epoch")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    whole = load("mnist", arguments.data_dir)
    count = arguments.images
    train = LabelledImages(whole.train.images[:count], whole.train.labels[:count])
    data = DataSet("mnist", train, whole.test)
    for seed in arguments.seeds:
        for name in arguments.variants:
            begin = time.process_time()
            training = make(arguments, data, seed, name)
            for _ in range(arguments.epochs):
                for _ in training.run_epoch():
                    pass
            scores = training.test()
            row = {
                "network": arguments.network,
                "variant": name,
                "block": arguments.block,
                "seed": seed,
                "images": len(train),
                "epochs": arguments.epochs,
                "accuracy": round(scores.accuracy, 5),
                "density": round(density(training.model), 4),
                "seconds": round(time.process_time() - begin, 1),
            }
            with arguments.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
