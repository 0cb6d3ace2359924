import torch
from rich.progress import track
from torch import nn

import dynsparse as ds
from dynsparse.data import load

train, test = load("digits")[1:]
model = nn.Sequential(nn.Linear(784, 320), nn.ReLU(), nn.Linear(320, 10))
model = ds.sparsify(model, density=0.1)  # in place; prints what became of each layer
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)  # after sparsify: the weights are new
trainer = ds.RigL(model, optimizer, total_steps=400, update_interval=20)
for batch in track(torch.randint(len(train), (400, 64)), "training"):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(train.images[batch]), train.labels[batch]).backward()
    trainer.step()  # the optimizer's step, and the pattern update when one is due
right = model(test.images).argmax(1) == test.labels
print(f"{right.float().mean():.1%} correct after {trainer.updates} pattern updates")
