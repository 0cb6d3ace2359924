"""Train a language model of very few weights: 1 to 10 in a thousand.

After Gao et al. 2025, "Weight-sparse transformers have interpretable circuits": wide layers, few
weights, activations with only their largest magnitudes, RMSNorm, sparse biases. Their rule trains
dense matrices and keeps the largest weights after each step of AdamW (`--method keep`). RigL and
gradual magnitude pruning store only the present weights. Every neuron keeps its largest incoming
and outgoing weights (`--least`).

    python examples/weight_sparse_gpt.py --width 1024 --density 0.01 --method rigl
    python examples/weight_sparse_gpt.py --width 1024 --density 0.01 --method keep
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import dynsparse as ds
from dynsparse.data.text import read_stdlib, read_text

LENGTH, BATCH = 128, 8


def least_kept(size: Tensor, count: int) -> Tensor:
    """The `count`-th largest number of the last dimension, [..., 1]."""
    if size.is_cuda:
        return size.topk(count, -1).values[..., -1:]
    # NumPy's partition takes a fifth to a thirteenth of the time of torch's topk.
    return torch.from_numpy(np.partition(size.numpy(), -count)[..., -count, None])


class AbsTopK(nn.Module):
    """Keeps a share of the last dimension, the largest magnitudes; the rest and its gradient are
    zero."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        size, count = x.detach().abs(), max(1, round(self.share * x.shape[-1]))
        return x * ((size >= least_kept(size, count)) & (size > 0))


class Block(nn.Module):
    """A pre-norm transformer block: attention and feed-forward."""

    def __init__(self, width: int, heads: int, share: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.keep = AbsTopK(share)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.keep(self.norm1(x))).unflatten(-1, (3, self.heads, -1)).movedim(2, 0)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(self.keep(mixed))
        hidden = self.keep(nn.functional.gelu(self.up(self.keep(self.norm2(x)))))
        return x + self.down(hidden)


class GPT(nn.Module):
    """Returns the loss of bytes [batch, length + 1]."""

    def __init__(self, width: int, layers: int, heads: int, share: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, share) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def keep_largest(weight: Tensor, count: int, least: int = 0) -> None:
    """Set all but the `count` largest magnitudes to zero; keep the `least` largest of every row and
    column in any case."""
    if count >= weight.numel():
        return
    size = weight.abs()
    if least and weight.dim() == 2:
        for dim in (0, 1):
            best = size.topk(min(least, size.shape[dim]), dim).indices
            size.scatter_(dim, best, float("inf"))
    count = max(count, int(size.isinf().sum()))
    weight.mul_(size >= least_kept(size.flatten(), count))


class KeepLargest:
    """Their rule: dense weights and gradients; each step keeps the largest weights, and the `least`
    largest of every neuron. The density falls from 1 in the first half of the training."""

    def __init__(
        self,
        weights: list[Tensor],
        optimizer: torch.optim.Optimizer,
        density: float,
        total_steps: int,
        least: int,
    ) -> None:
        self.weights, self.optimizer = weights, optimizer
        self.density, self.total_steps, self.least = density, total_steps, least
        self.steps = 0

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        falling = max(0.0, 1 - 2 * self.steps / self.total_steps)
        density = self.density + (1 - self.density) * falling
        for weight in self.weights:
            keep_largest(weight.detach(), round(density * weight.numel()), self.least)


class DropScore:
    """|w|, with the `least` largest weights of every row and column ranked above all others, so
    that they are dropped last."""

    def __init__(self, model: nn.Module, least: int) -> None:
        self.layers = {id(part.values): part for part in model.modules() if hasattr(part, "values")}
        self.least = least

    def __call__(self, values: Tensor) -> Tensor:
        pattern, size = self.layers[id(values)].pattern, values.detach().abs()
        stays = torch.zeros_like(size, dtype=torch.bool)
        by_size = size.argsort(descending=True, stable=True)
        for lines in (pattern.rows, pattern.cols):
            order = by_size[lines[by_size].argsort(stable=True)]  # line by line, largest first
            counts = lines.bincount()
            rank = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
            stays[order[rank < self.least]] = True
        return size + stays * size.amax() if len(size) else size


def make(
    method: str, density: float, steps: int, width: int, layers: int, heads: int, share: float,
    least: int = 4, embeddings: bool = False,
):  # fmt: skip
    """The model and its trainer. With `embeddings`, the embeddings and the output layer are sparse,
    too."""
    model = GPT(width, layers, heads, share)
    dense = [] if embeddings else ["tokens", "places", "head"]
    if method != "keep":
        start = density if method == "rigl" else min(0.5, 10 * density)
        ds.sparsify(model, start, allocation="uniform", exclude=dense, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    if method == "keep":
        kinds = (nn.Linear, nn.Embedding)
        weights = [
            part.weight for name, part in model.named_modules()
            if isinstance(part, kinds) and name not in dense
        ]  # fmt: skip
        return model, KeepLargest(weights, optimizer, density, steps, least)
    interval, score = max(1, min(20, steps // 20)), DropScore(model, least)
    settings = {"total_steps": steps, "update_interval": interval, "drop_score": score}
    if method == "rigl":
        return model, ds.RigL(model, optimizer, **settings)
    return model, ds.GMP(model, optimizer, final_density=density, end_fraction=0.5, **settings)


def sample(data: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator)
    return data[starts + torch.arange(LENGTH + 1)].long()


def train(
    model: nn.Module, trainer, data: Tensor, steps: int, seed: int, report: int | None = None
) -> None:
    """Train on random sequences of bytes; keep a tenth of each bias in the blocks. Print the loss
    every `report` steps."""
    biases = [part.bias for part in model.blocks.modules()
              if getattr(part, "bias", None) is not None]  # fmt: skip
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, steps)
    generator, times = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        loss = model(sample(data, generator))
        trainer.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.step()
        for bias in biases:
            keep_largest(bias.detach(), max(1, len(bias) // 10))
        decay.step()
        times.append(time.perf_counter() - begin)
        if report and (step % report == 0 or step == steps):
            print(f"step {step:5}  loss {loss.item():.3f}  {statistics.median(times):.3f} s a step")


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=["rigl", "gmp", "keep"], default="rigl")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--activations", type=float, default=0.25, help="share that AbsTopK keeps")
    parser.add_argument("--least", type=int, default=4, help="weights kept in and out of a neuron")
    parser.add_argument("--embeddings", action="store_true", help="sparse embeddings and head")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--data", type=Path, help="a text file (default: Python's sources)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    torch.manual_seed(args.seed)
    text = read_text(args.data) if args.data else read_stdlib()
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    seen, test = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    model, trainer = make(
        args.method, args.density, args.steps, args.width, args.layers, args.heads,
        args.activations, args.least, args.embeddings,
    )  # fmt: skip
    train(model, trainer, seen, args.steps, args.seed, report=50)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        final = statistics.fmean(model(sample(test, generator)).item() for _ in range(50))
    weights = [p for name, p in model.blocks.named_parameters()
               if name.endswith(("weight", "values")) and "norm" not in name]  # fmt: skip
    count = sum(int((w != 0).sum()) for w in weights)
    print(f"test loss {final:.3f}  {count:,} weights in the blocks  {args.method}")
    return final


if __name__ == "__main__":
    main()
