"""The training itself: model, optimizer, pattern updates, steps and evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynsparse.apps.lm.corpus import Corpus
from dynsparse.apps.lm.loss import repetition_weights, token_losses
from dynsparse.apps.lm.methods import build_trainer
from dynsparse.apps.lm.model import build_model
from dynsparse.apps.lm.optimizer import build_optimizer, learning_rate
from dynsparse.apps.lm.options import Options

__all__ = ["Report", "Scores", "Training", "precision"]


@dataclass(frozen=True)
class Scores:
    """Mean cross-entropy per token in nats, and the share of tokens guessed right."""

    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class Report:
    """What happened over some steps.

    `step` says where the training stands; `train` are means over the `steps` since the report
    before, with dropout, `valid` is of the validation part; `replaced` counts connections;
    `seconds` are of training alone.
    """

    step: int
    steps: int
    train: Scores
    valid: Scores
    replaced: int
    seconds: float
    learning_rate: float
    tokens: int


class Training:
    """One training run. All its randomness comes from `seed`.

    The order of the batches depends on the seed alone, the first patterns and weights on seed and
    sizes: methods see the same data and start from the same sparse network.

    Args:
        options: with the sizes that are built (see `sizes.matched`).

    Raises:
        ValueError: an optimizer argument or a schedule that does not fit, sequences longer than the
            data.
    """

    def __init__(self, options: Options, corpus: Corpus, seed: int) -> None:
        corpus.check_length(options.sequence_length)
        self.options = options
        self.corpus = corpus
        self.seed = seed
        torch.manual_seed(seed)  # dropout and the dense table draw from the global generator
        initial = torch.Generator().manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)  # draws the batches
        self.model = build_model(options, corpus.size, initial)
        self.optimizer = build_optimizer(options, self.model)
        self.trainer = build_trainer(options, self.model, self.optimizer, initial)
        self.step = 0
        self.seconds = 0.0
        self.update_seconds = 0.0
        self.replaced = 0
        self.history: list[dict[str, Any]] = []

    @property
    def updates(self) -> int:
        return 0 if self.trainer is None else self.trainer.updates

    @property
    def tokens_per_step(self) -> int:
        options = self.options
        return options.batch_size * options.gradient_accumulation_count * options.sequence_length

    def run(self, last_step: int) -> Iterator[Report]:
        """Train up to `last_step`, with a report at every `valid_interval` and at the end."""
        sums = _Sums()
        while self.step < last_step:
            begin = time.perf_counter()
            rate = self._train_step(sums)
            self.step += 1
            sums.seconds += time.perf_counter() - begin
            if self.step % self.options.valid_interval == 0 or self.step == last_step:
                yield self._report(sums, rate)
                sums = _Sums()

    def _report(self, sums: _Sums, rate: float) -> Report:
        train = sums.scores()
        if not math.isfinite(train.loss):
            raise ValueError(
                f"the training diverged: the loss is {train.loss} after step {self.step}: lower "
                "--peak-learning-rate"
            )
        self.seconds += sums.seconds
        self.replaced += sums.replaced
        return Report(
            self.step, sums.steps, train, self.evaluate("valid"), sums.replaced, sums.seconds,
            rate, sums.steps * self.tokens_per_step,
        )  # fmt: skip

    def _train_step(self, sums: _Sums) -> float:
        options = self.options
        rate = learning_rate(options, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        self.optimizer.zero_grad()
        count = options.gradient_accumulation_count
        # Drawn at once: the same batch however it is cut into micro-batches.
        batch = self.corpus.batch(
            options.batch_size * count, options.sequence_length, self.generator
        )
        for part in batch.chunk(count):
            loss, losses, right = self.losses(part)
            (loss / count).backward()
            sums.add(losses.detach(), right)
        if options.grad_norm_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.grad_norm_clip)
        sums.replaced += self._optimise()
        sums.steps += 1
        return rate

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of sequences and the tokens that follow, [n, T + 1].

        Returns:
            (what is trained on, a scalar; cross-entropies [n, T - offset]; right answers, bool of
            the same shape).
        """
        offset = self.options.autoregression_offset
        targets = batch[:, 1 + offset :]
        with precision(self.options.data_type):
            logits = self.model(batch[:, :-1])[:, offset:]
        losses = token_losses(logits, targets)
        right = logits.detach().argmax(-1) == targets
        if self.options.repetition_weighting:
            weighted = (losses * repetition_weights(targets)).sum(1).mean()
            return weighted, losses, right
        return losses.mean(), losses, right

    def _optimise(self) -> int:
        """The optimizer's step, and the pattern update if one is due: connections replaced."""
        if self.trainer is None:
            self.optimizer.step()
            return 0
        begin = time.perf_counter()
        rewirings = self.trainer.step()
        if rewirings is None:
            return 0
        self.update_seconds += time.perf_counter() - begin
        return sum(
            len(rewiring.grown) * rewiring.after.block_size**2 for rewiring in rewirings.values()
        )

    @torch.no_grad()
    def evaluate(self, part: str) -> Scores:
        """The scores on "valid" or "test", without dropout and unweighted.

        On the whole part, or on as many sequences at its begin as hold `evaluation_tokens`.
        """
        length = self.options.sequence_length
        stretches = self.corpus.stretches(part, length, self.options.evaluation_tokens)
        self.model.eval()
        sums = _Sums()
        for batch in stretches.split(self.options.batch_size):
            _, losses, right = self.losses(batch)
            sums.add(losses, right)
        return sums.scores()


def precision(data_type: str) -> AbstractContextManager[Any]:
    """The context in which a model of that type computes."""
    return torch.autocast("cpu", torch.bfloat16) if data_type == "bfloat16" else nullcontext()


class _Sums:
    """Sums over tokens and steps. The scores stay tensors until they are asked for."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.loss = torch.zeros((), dtype=torch.float64)
        self.right = torch.zeros((), dtype=torch.int64)
        self.replaced = 0
        self.seconds = 0.0

    def add(self, losses: Tensor, right: Tensor) -> None:
        self.tokens += losses.numel()
        self.loss += losses.double().sum()
        self.right += right.sum()

    def scores(self) -> Scores:
        return Scores(float(self.loss) / self.tokens, int(self.right) / self.tokens)
