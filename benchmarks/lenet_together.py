"""Several LeNet-300-100 of lenet.py trained as one network, in little more time than one takes.

A network this small spends most of its time outside the products. Here the networks of all seeds
are the diagonal blocks of one: each has its own initial weights and pattern, its own data order,
and drops and grows as many weights within its block as it would alone. A test compares them with
networks that train alone.

    python benchmarks/lenet_together.py --data-dir DIR --seeds 0 1 2 3 4 [the flags of lenet.py]
    python benchmarks/lenet_together.py --data-dir DIR --hold-out 10000 --seeds 0 1 \
        --variants decay=1e-4 "distort=1 distorted=0.5"     # every seed with each of them

Prints and writes a line per network, as lenet.py does with --no-masked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import lenet
import torch
import torch.nn.functional as F
from lenet import BATCH, MOMENTUM, Average, Settings
from lenet_images import Bent
from torch import Tensor, nn

import dynsparse as ds
from dynsparse import SparsePattern, training
from dynsparse.ranks import ALONE, GrowRequest, Ranks

SHARED = ("course", "interval", "share", "end")
"""Settings that must be the same for networks that train together."""

Pairs = Sequence[tuple[Tensor, Tensor]]


def of_block(pattern: SparsePattern, at: int, count: int) -> SparsePattern:
    """The diagonal block `at` of `count`."""
    height, width = (size // count for size in pattern.shape)
    inside = (pattern.rows // height) == at
    rows, cols = pattern.rows[inside] - at * height, pattern.cols[inside] - at * width
    return SparsePattern(rows, cols, shape=(height, width), block_size=1)


class GrowthByBlock(training.GradientGrowth):
    """Grows equally many weights in each diagonal block, where its gradient is largest."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def choose(
        self, requests: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        return [self._choose(r.pattern, r.count, r.pairs) for r in requests]

    def _choose(self, taken: SparsePattern, count: int, pairs: Pairs) -> Tensor:
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
            request = GrowRequest("", own, of_block(taken, at, self.count), count // self.count)
            (flat,) = super().choose([request], 0)
            rows, cols = flat // width + at * height, flat % width + at * width
            found.append(rows * taken.shape[1] + cols)
        return torch.cat(found)


class RanksByBlock:
    """Ranks of the magnitudes within each diagonal block, so that all blocks drop equally many.
    `values` holds block after block, with equally many weights each."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, values: Tensor) -> Tensor:
        magnitudes = training.magnitude(values).view(self.count, -1)
        return magnitudes.argsort(dim=1, stable=True).argsort(1).flatten().to(values.dtype)


class ScheduleByBlock(training.CosineSchedule):
    """A schedule under which each network drops as many weights as it would alone."""

    blocks = 1

    def drop_count(self, step: int, nnz: int) -> int:
        return self.blocks * super().drop_count(step, nnz // self.blocks)


class Together(nn.Module):
    """Networks of `lenet.build` as diagonal blocks of one: [batch, networks * 784] ->
    [networks, batch, 10]."""

    def __init__(self, networks: Sequence[nn.Sequential], settings: Sequence[Settings]) -> None:
        super().__init__()
        layers = [[m for m in n if not isinstance(m, (nn.ReLU, nn.Dropout))] for n in networks]
        *sparse, dense = zip(*layers, strict=True)
        self.sparse = nn.ModuleList(self._stacked(these) for these in sparse)
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in dense]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in dense]))
        self.dropout = [own.dropout for own in settings]

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

    def _dropped(self, x: Tensor) -> Tensor:
        """Dropout with each network's own rate."""
        if not (self.training and any(self.dropout)):
            return x
        kept = 1 - x.new_tensor(self.dropout).repeat_interleave(x.shape[1] // len(self.dropout))
        return x * (torch.rand_like(x) < kept) / kept

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.sparse:
            x = self._dropped(F.relu(layer(x)))
        each = x.view(len(x), len(self.bias), -1).transpose(0, 1)
        return torch.baddbmm(self.bias[:, None], each, self.weight.transpose(1, 2))


class Training:
    """Trains all networks; `step` takes a batch of each network's own images.

    Args:
        settings: of each network. They may differ, except in those of `SHARED`.
    """

    def __init__(
        self, networks: Sequence[nn.Sequential], total_steps: int, settings: Sequence[Settings]
    ) -> None:
        self.count, self.settings = len(networks), settings[0]
        for name in SHARED:
            if len({getattr(own, name) for own in settings}) > 1:
                raise SystemExit(f"networks that train together must have the same {name}")
        self.total_steps, self.steps = total_steps, 0
        self.model = Together(networks, settings)
        self.average = Average(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), self.settings.rate, MOMENTUM, nesterov=True, fused=True
        )
        dtype = self.model.weight.dtype
        # Relative to the first network's rate: scaling the gradient acts like scaling the rate.
        self.rates = torch.tensor([own.rate / settings[0].rate for own in settings], dtype=dtype)
        self.decays = torch.tensor([own.decay for own in settings], dtype=dtype)
        self.smoothing = torch.tensor([own.smoothing for own in settings], dtype=dtype)
        schedule = ScheduleByBlock(
            total_steps, self.settings.interval, self.settings.share, self.settings.end
        )
        object.__setattr__(schedule, "blocks", self.count)
        self.trainer = training.SparseTrainer(
            self.model,
            self.optimizer,
            schedule=schedule,
            growth=GrowthByBlock(self.count),
            drop_score=RanksByBlock(self.count),
        )

    @property
    def done(self) -> float:
        """The share of the training that is done."""
        return self.steps / self.total_steps

    def step(self, images: Tensor, labels: Tensor) -> None:
        """images [batch, networks, 784], labels [batch, networks]."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate_at(self.done)
        self.optimizer.zero_grad()
        found = self.model(images.flatten(1)).log_softmax(2)
        truth = found.gather(2, labels.t().unsqueeze(2)).squeeze(2)
        loss = torch.lerp(truth, found.mean(2), self.smoothing[:, None])
        (-loss.sum() / len(images)).backward()
        self._decay()
        self.steps += 1
        self.trainer.step()

    @torch.no_grad()
    def _decay(self) -> None:
        for p in self.model.parameters():  # each has as many elements per network
            each = p.grad.view(self.count, -1)
            each.addcmul_(self.decays[:, None], p.view(self.count, -1))
            each.mul_(self.rates[:, None])

    @torch.no_grad()
    def errors(self, images: Tensor, labels: Tensor, model: nn.Module | None = None) -> Tensor:
        """The error rate of each network."""
        model = self.model if model is None else model
        model.eval()
        wrong = torch.zeros(self.count, dtype=torch.float64)
        for part, truth in zip(images.split(1000), labels.split(1000), strict=True):
            found = model(part.repeat(1, self.count)).argmax(2)
            wrong += (found != truth).double().sum(1)
        model.train()
        return wrong / len(labels)


def variant_of(words: str, settings: Settings) -> Settings:
    """`settings` with the changes of "NAME=VALUE NAME=VALUE"."""
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    changed = {}
    for name, _, value in (word.partition("=") for word in words.split()):
        if name not in kinds:
            raise SystemExit(f"a variant sets {', '.join(kinds)}, got {name!r}")
        changed[name] = kinds[name](value)
    return replace(settings, **changed)


def main() -> None:
    parser = lenet.parser_of(__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=[""], help="each with every seed")
    arguments = parser.parse_args()
    data = lenet.data_of(arguments)
    torch.set_num_threads(arguments.threads)
    train, test = data.train, data.test
    variants = [variant_of(words, lenet.settings_of(arguments)) for words in arguments.variants]
    runs = [(seed, own) for own in variants for seed in arguments.seeds]
    settings = [own for _, own in runs]
    orders = [torch.Generator().manual_seed(seed) for seed, _ in runs]
    each = len(train) // BATCH
    run = Training([lenet.build(*one) for one in runs], arguments.epochs * each, settings)
    bent = Bent(train.images, settings)
    best = torch.ones(len(runs), dtype=torch.float64)
    for epoch in range(1, arguments.epochs + 1):
        order = torch.stack([torch.randperm(len(train), generator=g) for g in orders], 1)
        seen = bent.epoch(run.done, order)
        for at in range(0, each * BATCH, BATCH):
            batch = slice(at, at + BATCH)
            images = bent.all.index_select(0, seen[batch].flatten())  # faster than indexing
            run.step(images.view(BATCH, len(runs), -1), train.labels[order[batch]])
        last = run.errors(test.images, test.labels)
        best = torch.minimum(best, last)
        run.average.take(run.done, run.settings)
        if epoch % 10 == 0:
            found = " ".join(f"{100 * error:.2f}" for error in last)
            print(f"epoch {epoch}: {found}", file=sys.stderr)
    found = run.errors(train.images, train.labels)
    averaged = run.errors(test.images, test.labels, run.average.model)
    for at, (seed, own) in enumerate(runs):
        row: dict[str, Any] = {"seed": seed, "epochs": arguments.epochs, **asdict(own)}
        row["held out"] = arguments.hold_out
        row["sparse"] = {
            "final": float(last[at]),
            "best": float(best[at]),
            "training": float(found[at]),
            "averaged": float(averaged[at]),
        }
        lenet.report(row, arguments)
    for at, words in enumerate(arguments.variants):
        own = slice(at * len(arguments.seeds), (at + 1) * len(arguments.seeds))
        print(f"{words or 'plain'}, final error: mean {100 * last[own].mean():.2f} %")


if __name__ == "__main__":
    main()
