import torch
from torch.nn.functional import cross_entropy

import dynsparse as ds
from dynsparse.data import load

torch.manual_seed(0)
digits = load("digits")
model = torch.nn.Sequential(
    ds.nn.SparseLinear(784, 320, density=0.1),
    torch.nn.ReLU(),
    ds.nn.SparseLinear(320, 10, density=0.3),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
trainer = ds.RigL(model, optimizer, total_steps=400, update_interval=20, drop_fraction=0.3)
for _ in range(400):
    batch = torch.randint(len(digits.train.labels), (64,))
    loss = cross_entropy(model(digits.train.images[batch]), digits.train.labels[batch])
    optimizer.zero_grad()
    loss.backward()
    trainer.step()  # the optimizer's step, and the pattern update when one is due
accuracy = (model(digits.test.images).argmax(1) == digits.test.labels).float().mean().item()
print(f"{accuracy:.1%} correct after {trainer.updates} pattern updates")
