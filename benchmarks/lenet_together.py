"""Several LeNet-300-100 of lenet.py trained as one network, for little more time than one takes.

So small a network spends its time between the products. Here the networks of all seeds are the
diagonal blocks of one: each has its own first weights and pattern, sees its own order of pictures,
and drops and grows as many weights within its block as it would alone. A test compares them with
networks that train alone.

    python benchmarks/lenet_together.py --data-dir DIR --seeds 0 1 2 3 4 [the flags of lenet.py]
    python benchmarks/lenet_together.py --data-dir DIR --hold-out 10000 --seeds 0 1 \
        --decays 1e-4 2e-4 5e-4     # every seed with every weight decay

Prints and writes a line per network, as lenet.py does without its masked twin.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import lenet
import torch
import torch.nn.functional as F
from lenet import BATCH, MOMENTUM, Settings
from torch import Tensor, nn

import dynsparse as ds
from dynsparse import SparsePattern, training

Pairs = Sequence[tuple[Tensor, Tensor]]


def of_block(pattern: SparsePattern, at: int, count: int) -> SparsePattern:
    """The diagonal block `at` of `count`."""
    height, width = (size // count for size in pattern.shape)
    inside = (pattern.rows // height) == at
    rows, cols = pattern.rows[inside] - at * height, pattern.cols[inside] - at * width
    return SparsePattern(rows, cols, shape=(height, width), block_size=1)


class GrowthByBlock(training.GradientGrowth):
    """As many in each diagonal block, where its own gradient is largest."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def choose(self, taken: SparsePattern, count: int, pairs: Pairs) -> Tensor:
        height, width = (size // self.count for size in taken.shape)
        found = []
        for at in range(self.count):
            own = [
                (
                    x[:, at * width : (at + 1) * width].contiguous(),
                    dy[:, at * height : (at + 1) * height].contiguous(),
                )
                for x, dy in pairs
            ]
            flat = super().choose(of_block(taken, at, self.count), count // self.count, own)
            rows, cols = flat // width + at * height, flat % width + at * width
            found.append(rows * taken.shape[1] + cols)
        return torch.cat(found)

    choose_all = training.Growth.choose_all


class RanksByBlock:
    """Ranks of the magnitudes among those of a diagonal block, so that the lowest are as many of
    each: blocks have as many weights each, one block's after the other's."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, values: Tensor) -> Tensor:
        magnitudes = training.magnitude(values).view(self.count, -1)
        return magnitudes.argsort(dim=1, stable=True).argsort(1).flatten().to(values.dtype)


class ScheduleByBlock(training.CosineSchedule):
    """Of networks that each replace what they would alone."""

    blocks = 1

    def drop_count(self, step: int, nnz: int) -> int:
        return self.blocks * super().drop_count(step, nnz // self.blocks)


class Together(nn.Module):
    """Networks of `lenet.build` as diagonal blocks of one: [batch, networks * 784] ->
    [networks, batch, 10]."""

    def __init__(self, networks: Sequence[nn.Sequential], dropout: float) -> None:
        super().__init__()
        layers = [[m for m in n if not isinstance(m, (nn.ReLU, nn.Dropout))] for n in networks]
        *sparse, dense = zip(*layers, strict=True)
        self.sparse = nn.ModuleList(self._stacked(these) for these in sparse)
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in dense]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in dense]))
        self.dropout = dropout

    @staticmethod
    def _stacked(layers: Sequence[ds.nn.SparseLinear]) -> ds.nn.SparseLinear:
        height, width = layers[0].pattern.shape
        rows = torch.cat([layer.pattern.rows + i * height for i, layer in enumerate(layers)])
        cols = torch.cat([layer.pattern.cols + i * width for i, layer in enumerate(layers)])
        shape = (height * len(layers), width * len(layers))
        pattern = SparsePattern(rows, cols, shape=shape, block_size=1)
        dtype = layers[0].values.dtype
        made = ds.nn.SparseLinear(shape[1], shape[0], pattern=pattern, dtype=dtype)
        with torch.no_grad():
            made.values.copy_(torch.cat([layer.values for layer in layers]))
            made.bias.copy_(torch.cat([layer.bias for layer in layers]))
        return made

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.sparse:
            x = F.relu(layer(x))
            if self.dropout:
                x = F.dropout(x, self.dropout, self.training)
        each = x.view(len(x), len(self.bias), -1).transpose(0, 1)
        return torch.baddbmm(self.bias[:, None], each, self.weight.transpose(1, 2))


class Training:
    """All of them in steps: `step` takes a batch of each network's own pictures.

    Args:
        decays: the weight decay of each network, in place of that of `settings`.
    """

    def __init__(
        self,
        networks: Sequence[nn.Sequential],
        total_steps: int,
        settings: Settings,
        decays: Sequence[float] = (),
    ) -> None:
        self.count, self.settings = len(networks), settings
        self.total_steps, self.steps = total_steps, 0
        self.model = Together(networks, settings.dropout)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            settings.rate,
            MOMENTUM,
            weight_decay=0.0 if decays else settings.decay,
            nesterov=True,
            fused=True,
        )
        self.decays = torch.tensor(decays, dtype=torch.float64)
        schedule = ScheduleByBlock(total_steps, settings.interval, settings.share, settings.end)
        object.__setattr__(schedule, "blocks", self.count)
        self.trainer = training.SparseTrainer(
            self.model,
            self.optimizer,
            schedule=schedule,
            growth=GrowthByBlock(self.count),
            drop_score=RanksByBlock(self.count),
        )

    def step(self, images: Tensor, labels: Tensor) -> None:
        """images [batch, networks, 784], labels [batch, networks]."""
        rate = self.settings.rate_at(self.steps / self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        logits = self.model(images.flatten(1))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="sum")
        (loss / len(images)).backward()
        if len(self.decays):
            self._decay()
        self.steps += 1
        self.trainer.step()

    @torch.no_grad()
    def _decay(self) -> None:
        for p in self.model.parameters():  # each has as many elements per network
            each = p.grad.view(self.count, -1)
            each.addcmul_(self.decays[:, None].to(p.dtype), p.view(self.count, -1))

    @torch.no_grad()
    def errors(self, images: Tensor, labels: Tensor) -> Tensor:
        """The share of wrong answers of each network."""
        self.model.eval()
        wrong = torch.zeros(self.count, dtype=torch.float64)
        for part, truth in zip(images.split(1000), labels.split(1000), strict=True):
            found = self.model(part.repeat(1, self.count)).argmax(2)
            wrong += (found != truth).double().sum(1)
        self.model.train()
        return wrong / len(labels)


def main() -> None:
    parser = lenet.parser_of(__doc__.splitlines()[0])
    parser.add_argument("--decays", type=float, nargs="+", help="every seed with each of them")
    arguments = parser.parse_args()
    settings, data = lenet.settings_of(arguments), lenet.data_of(arguments)
    torch.set_num_threads(arguments.threads)
    train, test = data.train, data.test
    decays = arguments.decays or [settings.decay]
    runs = [(seed, decay) for decay in decays for seed in arguments.seeds]
    networks, orders = [], []
    for seed, _ in runs:
        networks.append(lenet.build(seed, settings))
        orders.append(torch.Generator().manual_seed(seed))
    each = len(train) // BATCH
    run = Training(networks, arguments.epochs * each, settings, [decay for _, decay in runs])
    best = torch.ones(len(networks), dtype=torch.float64)
    for _ in range(arguments.epochs):
        order = torch.stack([torch.randperm(len(train), generator=g) for g in orders], 1)
        for indices in order[: each * BATCH].view(each, BATCH, -1):
            run.step(train.images[indices], train.labels[indices])
        last = run.errors(test.images, test.labels)
        best = torch.minimum(best, last)
    found = run.errors(train.images, train.labels)
    for at, (seed, decay) in enumerate(runs):
        row: dict[str, Any] = {"seed": seed, "epochs": arguments.epochs, **asdict(settings)}
        row["decay"], row["held out"] = decay, arguments.hold_out
        row["sparse"] = {
            "final": float(last[at]),
            "best": float(best[at]),
            "training": float(found[at]),
        }
        lenet.report(row, arguments)
    for at, decay in enumerate(decays):
        own = last[at * len(arguments.seeds) : (at + 1) * len(arguments.seeds)].tolist()
        print(f"decay {decay:g}, final error: mean {100 * statistics.mean(own):.2f} %")


if __name__ == "__main__":
    main()
