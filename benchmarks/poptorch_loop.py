"""Many steps per call beside a plain training loop: the MNIST network, 50 steps per call.

    python benchmarks/poptorch_loop.py [--rounds 15] [--threads 2]

Both train the same sparse network (784-300-10, density 0.1, RigL) on random images without
compiling, in turn in one process. Prints the median ratio of call to loop.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import dynsparse as ds
from dynsparse.bench.timing import Effort, measure
from popsparse import poptorch

STEPS, BATCH = 50, 64


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
        self.layers = ds.sparsify(layers, density=0.1, exclude=["2"], verbose=False)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layers(x)
        return out, self.loss(out, labels)


def trainer_of(model: nn.Module) -> ds.RigL:
    optimizer = torch.optim.Adam(model.parameters())
    return ds.RigL(model, optimizer, total_steps=10**6, update_interval=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    x, labels = torch.rand(STEPS * BATCH, 784), torch.randint(10, (STEPS * BATCH,))
    by_hand, wrapped = Network(), Network()
    trainer = trainer_of(by_hand)
    options = poptorch.Options().deviceIterations(STEPS)
    call = poptorch.trainingModel(wrapped, options, trainer_of(wrapped), compile=False)

    def loop() -> None:
        for i in range(0, len(x), BATCH):
            trainer.optimizer.zero_grad()
            by_hand(x[i : i + BATCH], labels[i : i + BATCH])[1].backward()
            trainer.step()

    works = {"loop": loop, "call": lambda: call(x, labels)}
    ratio = measure(works, "loop", Effort(seconds=0, rounds=arguments.rounds)).ratios["call"]
    equal = all(
        torch.equal(a, b)
        for a, b in zip(by_hand.state_dict().values(), wrapped.state_dict().values(), strict=True)
    )
    print(f"{STEPS} steps in one call over the loop written out, {arguments.threads} threads:")
    print(f"median {ratio.median:.3f}, middle half {ratio.low:.3f} to {ratio.high:.3f}")
    print(f"weights and patterns equal: {equal}")


if __name__ == "__main__":
    main()
