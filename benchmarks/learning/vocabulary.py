"""The perplexity that a sparse vocabulary costs a small GPT.

    python benchmarks/learning/vocabulary.py --data novels.txt --bpe gpt2-bpe \
        --seeds 0 1 --output results.jsonl

Trains the model of pruned.py on byte pairs, prunes the blocks by Wanda with and without the
embedding tied to the head, fine-tunes the whole model with a fixed pattern, and prints a line of
JSON for each: the test perplexity after pruning and after fine-tuning.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from pruned import CALIBRATION, GPT, SIZES, Text, fine_tune, perplexity, report, train

import dynsparse as ds

VOCABULARY = ["tokens", "head"]
BLOCKS = 0.2  # density
TABLES = (1.0, 0.5, 0.2, 0.1)  # densities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--bpe", type=Path, required=True, help="a folder with GPT-2's vocab.bpe")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dense-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=200, help="steps of fine-tuning")
    parser.add_argument("--output", type=Path, help="also append the JSON lines to this file")
    options = parser.parse_args()
    size = SIZES["0.6M"]
    text = Text(options.data, size, options.bpe, options.vocabulary)
    for seed in options.seeds:
        torch.manual_seed(seed)
        dense = GPT(text.vocabulary, size)
        train(dense, text.batches(options.dense_steps, seed), size.rate)
        calibration = [batch[:, :-1] for batch in text.batches(CALIBRATION, 1000 + seed)]
        batches = text.batches(options.steps, 2000 + seed)
        rows = [{"table": "dense model", "pruned": perplexity(dense, text)}]
        tuned = copy.deepcopy(dense)
        train(tuned, batches, size.tuning_rate)
        rows[0]["tuned"] = perplexity(tuned, text)
        for density in TABLES:
            model = copy.deepcopy(dense)
            pruning = {"start": "wanda", "calibration": calibration, "verbose": False}
            ds.sparsify(model, BLOCKS, **pruning)
            if density < 1:
                ds.sparsify(model, density, include=VOCABULARY, **pruning)
            row = {"table": density, "pruned": perplexity(model, text)}
            fine_tune(model, batches, "static", size.tuning_rate)
            rows.append(row | {"tuned": perplexity(model, text)})
        for row in rows:
            report({"seed": seed, **row}, options.output)


if __name__ == "__main__":
    main()
