"""The character model of Evci et al. 2020, "Rigging the Lottery", section 4.2: 75 % sparse.

A GRU with 512 features that predicts the next byte of a text, after their appendix I: a shared
embedding of 128 features for 256 bytes, linear layers of 256 and 128 features after the GRU, Adam
with a rate of 7e-4 and an L2 coefficient of 5e-4, batches of 32, gradients clipped at a norm of 10;
RigL and SET replace 10 % of the weights every 100 steps, by a cosine until the end; pruning from a
quarter to three quarters of the training. They train 200,000 steps of 512 characters.

    python benchmarks/character_model.py --data train.txt.xz --valid valid.txt.xz --seeds 0 1 2

Prints a line of JSON per training, with losses in bits per byte.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, relu

import dynsparse as ds
from dynsparse.data.text import read_text

BATCH, CLIP, RATE, DECAY = 32, 10.0, 7e-4, 5e-4
DENSITY, SHARE = 0.25, 0.1
CHECKS = 8
"""How many times a training is validated, the last time at its end."""
METHODS = ("dense", "small", "static", "set", "rigl", "gmp")
SMALL = 0.515
"""The width of a dense network with as many parameters as the sparse one, relative to its."""


class CharacterModel(nn.Module):
    """Predicts the next byte: tokens [batch, length] -> logits [batch, length, 256].

    Args:
        width: scales all layers.
    """

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        embedded, state, wide, narrow = (round(width * size) for size in (128, 512, 256, 128))
        self.embedding = nn.Embedding(256, embedded)
        self.from_input = nn.Linear(embedded, 3 * state)
        self.from_state = nn.Linear(state, 3 * state)
        self.wide, self.narrow = nn.Linear(state, wide), nn.Linear(wide, narrow)
        self.bias = nn.Parameter(torch.zeros(256))
        nn.init.normal_(self.embedding.weight, std=embedded**-0.5)
        self.state = state

    def recur(self, x: Tensor) -> Tensor:
        """The GRU: [batch, length, features] -> its states [batch, length, features]."""
        h = x.new_zeros(len(x), self.state)
        states = []
        for given in self.from_input(x.transpose(0, 1)):  # all positions in one product
            reset, update, new = given.chunk(3, 1)
            from_reset, from_update, from_new = self.from_state(h).chunk(3, 1)
            update = torch.sigmoid(update + from_update)
            new = torch.tanh(new + torch.sigmoid(reset + from_reset) * from_new)
            h = torch.lerp(new, h, update)
            states.append(h)
        return torch.stack(states, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.recur(self.embedding(tokens))
        narrow = relu(self.narrow(relu(self.wide(states))))
        return linear(narrow, self.embedding.weight, self.bias)


def make(method: str, seed: int, steps: int, interval: int) -> tuple[nn.Module, Any]:
    """The network and what trains it: a trainer, or the optimizer of a dense network."""
    torch.manual_seed(seed)
    model = CharacterModel(SMALL if method == "small" else 1.0)
    if method in ("static", "set", "rigl"):
        ds.sparsify(model, density=DENSITY, allocation="uniform", verbose=False)
    elif method == "gmp":
        ds.sparsify(model, density=1.0, keep_sparse=True, verbose=False)
    optimizer = torch.optim.Adam(model.parameters(), RATE, weight_decay=DECAY, fused=True)
    if method == "gmp":
        return model, ds.GMP(
            model,
            optimizer,
            total_steps=steps,
            final_density=DENSITY,
            update_interval=interval,
            start_fraction=0.25,
        )
    if method in ("set", "rigl"):
        schedule = ds.training.CosineSchedule(steps, interval, SHARE, end_fraction=1.0)
        return model, (ds.RigL if method == "rigl" else ds.SET)(model, optimizer, schedule=schedule)
    return model, ds.Static(model, optimizer) if method == "static" else optimizer


def sequences(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The bytes from each start on and those that follow them, each [starts, length]."""
    found = text[starts[:, None] + torch.arange(length + 1)].long()
    return found[:, :-1], found[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross entropy, in nats per byte."""
    tokens, following = batch
    return cross_entropy(model(tokens).flatten(0, 1), following.flatten())


@torch.no_grad()
def validate(model: nn.Module, text: Tensor, length: int) -> float:
    """The mean loss over 512 sequences, evenly spaced in the text, in bits per byte."""
    starts = torch.linspace(0, len(text) - length - 1, 512).long()
    losses = [loss_of(model, sequences(text, part, length)) for part in starts.split(BATCH)]
    return float(torch.stack(losses).mean()) / math.log(2)


def train(method: str, seed: int, text: Tensor, valid: Tensor, args: Any) -> dict[str, Any]:
    model, trainer = make(method, seed, args.steps, args.interval)
    chance = torch.Generator().manual_seed(seed)
    checks = [args.steps * i // CHECKS for i in range(1, CHECKS + 1)]
    training, curve, begin = [], [], time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.length - 1, (BATCH,), generator=chance)
        loss = loss_of(model, sequences(text, starts, args.length))
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        trainer.step()
        training.append(loss.item() / math.log(2))
        if step in checks:
            curve.append(validate(model, valid, args.length))
    last = training[-args.steps // CHECKS :]
    return {
        "method": method, "seed": seed, "steps": args.steps, "length": args.length,
        "interval": args.interval,
        "valid": curve[-1], "training": sum(last) / len(last), "curve": curve,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def bytes_of(path: Path) -> Tensor:
    return torch.from_numpy(np.frombuffer(read_text(path).encode(), np.uint8).copy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="text to train on")
    parser.add_argument("--valid", type=Path, required=True, help="text to validate on")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--length", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--interval", type=int, default=100, help="steps between updates")
    parser.add_argument("--json", type=Path, help="append a line per training to this file")
    args = parser.parse_args()
    text, valid = bytes_of(args.data), bytes_of(args.valid)
    for seed in args.seeds:
        for method in args.methods:
            row = train(method, seed, text, valid, args)
            print(json.dumps(row), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
