"""torch's transformer encoder, made sparse in one line and trained on rows of digits."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dynsparse as ds
from dynsparse.data import load


class Transformer(nn.Module):
    """Classifies images as sequences of 28 tokens, their rows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(28, width)
        self.position = nn.Parameter(torch.randn(28, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(images.view(-1, 28, 28)) + self.position
        return self.head(self.encoder(tokens).mean(1))


torch.manual_seed(0)
digits = load("digits")
model = ds.sparsify(Transformer(), density=0.2, exclude=["head"])
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)  # after sparsify: the weights are new
trainer = ds.RigL(model, optimizer, total_steps=150, update_interval=10, drop_fraction=0.3)
for _ in range(150):
    batch = torch.randint(len(digits.train.labels), (64,))
    loss = cross_entropy(model(digits.train.images[batch]), digits.train.labels[batch])
    optimizer.zero_grad()
    loss.backward()
    trainer.step()
model.eval()
with torch.no_grad():
    accuracy = (model(digits.test.images).argmax(1) == digits.test.labels).float().mean().item()
print(f"{accuracy:.1%} correct after {trainer.updates} pattern updates")
