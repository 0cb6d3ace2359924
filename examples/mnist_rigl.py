"""Train a sparse network with RigL in plain PyTorch: no command line, no framework.

python examples/mnist_rigl.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import dynsparse as ds
from dynsparse.data import load

EPOCHS, BATCH = 10, 16


def main() -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a network this small gains nothing from more
    digits = load("digits")  # or load("mnist"), which downloads it
    images, labels = digits.train.images, digits.train.labels

    # 1. Sparse layers in place of nn.Linear: a tenth and a third of the weights.
    model = nn.Sequential(
        ds.nn.SparseLinear(784, 320, density=0.1),
        nn.ReLU(),
        nn.Dropout(0.1),
        ds.nn.SparseLinear(320, 10, density=0.3),
    )
    # 2. Any torch optimizer: the values are ordinary parameters.
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    # 3. A trainer that runs the optimizer's steps and updates the pattern in between.
    steps = EPOCHS * -(-len(labels) // BATCH)
    trainer = ds.RigL(model, optimizer, total_steps=steps, update_interval=20, drop_fraction=0.3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    for epoch in range(1, EPOCHS + 1):
        for batch in torch.randperm(len(labels)).split(BATCH):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            trainer.step()  # instead of optimizer.step()
            decay.step()
        print(f"epoch {epoch:2}  loss {loss.item():.4f}  pattern updates {trainer.updates}")

    model.eval()
    with torch.no_grad():
        right = model(digits.test.images).argmax(1) == digits.test.labels
    accuracy = right.float().mean().item()
    print(f"test accuracy {100 * accuracy:.2f} %")
    for layer in trainer.layers.values():
        print(f"{layer.pattern.nnz:6,} weights of {layer.pattern.total:,}")
    return accuracy


if __name__ == "__main__":
    main()
