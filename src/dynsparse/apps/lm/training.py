"""The training of a language model: optimizer, learning rate, steps, evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynsparse.apps import common
from dynsparse.apps.common.training import (
    Groups,
    Scores,
    Stopped,
    Sums,
    make_optimizer,
    precision,
    random_ids,
    start_denser,
)
from dynsparse.apps.lm.corpus import Corpus
from dynsparse.apps.lm.model import (
    LanguageModel,
    build_model,
    match_parameters_of,
    repetition_weights,
    scale_matrices,
    token_losses,
)
from dynsparse.apps.lm.options import Options
from dynsparse.tracing import span, spanned

# The arguments of each optimizer with their defaults.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "GradientDescent": {"weight_decay": 0.0},
    "Momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
    "Adam": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1},
}


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the options; weight decay, decoupled with Adam, is of matrices alone.

    Raises:
        ValueError: an argument the optimizer does not have, or a value it does not take.
    """
    return make_optimizer(
        options,
        _ARGUMENTS[options.optimizer],
        partial(_make_groups, model),
        options.peak_learning_rate,
        torch.optim.AdamW,
    )


def _make_groups(model: nn.Module, weight_decay: float) -> Groups:
    """Matrices, which decay, and the rest: biases, norms and positions."""
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = name.rpartition(".")[2] in ("weight", "values") and "norm" not in name
        (decaying if is_matrix else others).append(parameter)
    return [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def learning_rate(options: Options, step: int) -> float:
    """The rate of step `step`, from 0: stateless, so a resumed training agrees.

    It rises in proportion to the steps for `warm_up`, then falls from the peak to the least
    rate as (1 - share of the `cooldown_steps` passed) ^ decay_power, and stays there.
    """
    peak, least = options.peak_learning_rate, options.min_learning_rate
    if step < options.warm_up:
        return peak * (step + 1) / options.warm_up
    cooldown = options.cooldown_steps or options.steps - options.warm_up
    passed = min(1.0, (step - options.warm_up) / cooldown)
    return least + (peak - least) * (1 - passed) ** options.decay_power


class Training(common.Training):
    """One training run of the language model.

    The order of the batches depends on the seed alone, the first patterns and weights on seed and
    sizes: methods see the same data and, but for those that begin denser, start from the same
    sparse network.

    Attributes:
        built: the options with the sizes that are built (see `model.match_parameters_of`).
        history: an entry per report, losses in nats per token, accuracies as shares.

    Raises:
        ValueError: an optimizer argument or a schedule that does not fit, sequences longer than the
            data, no dense model that matches.
    """

    app = "lm"
    unit = "step"
    digits = 7
    generator_name = "batches"
    counters = ("step", "seconds", "update_seconds", "replaced", "skipped", "history")
    partial_names = ("window",)
    rate_flag = "peak-learning-rate"
    options: Options
    model: LanguageModel

    def __init__(self, options: Options, corpus: Corpus, seed: int) -> None:
        self.corpus = corpus
        self.built = match_parameters_of(options, corpus.size)
        self.history: list[dict[str, Any]] = []
        self._synthetic: Tensor | None = None
        super().__init__(
            options,
            seed,
            total_steps=options.pattern_steps,
            update_interval=options.interval,
            initial=torch.Generator().manual_seed(seed),
        )

    def build_model(self, initial: torch.Generator) -> tuple[LanguageModel, dict[str, float]]:
        model = build_model(self.built, self.corpus.size, initial)
        final = start_denser(self.options.method, model, initial)
        if final:
            scale_matrices(model, self.options.initial_scale)
        return model, final

    def build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.options, self.model)

    def extra_state(self) -> dict[str, Any]:
        return {
            "data": str(self.options.data),
            "vocabulary": self.corpus.vocabulary,
            "train_tokens": len(self.corpus.train),
            "train_digest": self.corpus.digest(),
        }

    def check_extra_state(self, path: Path, saved: dict[str, Any]) -> None:
        if self.options.trains and saved["train_digest"] != self.corpus.digest():
            raise ValueError(
                f"--data: {path} was trained on {saved['train_tokens']:,} tokens, got "
                f"{len(self.corpus.train):,} others: name the same text, and the same shares of it"
            )

    def metadata(self) -> dict[str, Any]:
        return {"data": self.corpus.name, "steps": self.options.steps}

    @property
    def tokens_per_step(self) -> int:
        options = self.options
        return options.batch_size * options.gradient_accumulation_count * options.sequence_length

    def run(self, last_step: int) -> Iterator[dict[str, Any]]:
        """Train up to `last_step`; an entry of the history at every `valid_interval` and the end.

        Raises:
            ValueError: the training diverged.
            Stopped: after `stop_asked` was set.
        """
        partial, self.partial = self.partial, {}
        sums = Sums.from_state(partial["window"]) if partial else Sums()
        while self.step < last_step:
            if self.stop_asked:
                self.partial = {"window": sums.state()} if sums.steps else {}
                raise Stopped
            begin = time.perf_counter()
            self._train_step(sums)
            sums.seconds += time.perf_counter() - begin
            if self.step % self.options.valid_interval == 0 or self.step == last_step:
                self.finish_window(sums)
                self.history.append(self._make_entry(sums))
                yield self.history[-1]
                sums = Sums()

    def _make_entry(self, sums: Sums) -> dict[str, Any]:
        train, valid = sums.scores(), self.evaluate("valid")
        tokens = sums.steps * self.tokens_per_step
        return {
            "step": self.step,
            "loss": train.loss,
            "accuracy": train.accuracy,
            "valid_loss": valid.loss,
            "valid_perplexity": valid.perplexity,
            "valid_accuracy": valid.accuracy,
            "learning_rate": self.rate,
            "replaced": sums.replaced,
            "tokens_per_second": tokens / sums.seconds if sums.seconds else 0.0,
        }

    def _train_step(self, sums: Sums) -> None:
        options = self.options
        count = options.gradient_accumulation_count
        if self.machine is not None:
            self.set_rate(learning_rate(options, self.step))
            self.model.train()
            batch = self._next_batch(options.batch_size)
            targets = batch[:, 1 + options.autoregression_offset :].contiguous()
            _, logits = self.step_on_machine(sums, batch[:, :-1].contiguous(), targets)
            logits = logits[:, options.autoregression_offset :]
            _add_scores(sums, token_losses(logits, targets), logits.argmax(-1) == targets)
            return
        with span("data"):
            self.set_rate(learning_rate(options, self.step))
            self.model.train()
            # Drawn at once: the same batch however it is cut into micro-batches.
            batch = self._next_batch(options.batch_size * count)
            parts = batch.chunk(count)
            self.optimizer.zero_grad()
        for number, part in enumerate(parts, start=1):
            local, weight = self.rank_share(part)
            with self._skip_sync(number < len(parts)):
                with span("forward"):
                    loss, losses, right = self.losses(local)
                    loss = loss / count
                    if weight:
                        _add_scores(sums, losses.detach(), right)
                with span("backward"):
                    self.scaler.scale(loss if weight == 1 else loss * weight).backward()
        if self.clip_grad_norm is not None:
            with span("clip"):
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad_norm)
        self.optimise(sums)

    def _next_batch(self, count: int) -> Tensor:
        length = self.options.sequence_length
        if not self.options.synthetic_data:
            return self.corpus.batch(count, length, self.generator)
        if self._synthetic is None:
            self._synthetic = random_ids(self.corpus.size, (count, length + 1), self.device)
        return self._synthetic

    def _skip_sync(self, skip: bool) -> AbstractContextManager[None]:
        """A context in which gradients stay on their rank if `skip`."""
        if skip and isinstance(self.replica, DistributedDataParallel):
            return self.replica.no_sync()
        return nullcontext()

    def machine_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return token_losses(output[:, self.options.autoregression_offset :], target).mean()

    @property
    def clip_grad_norm(self) -> float | None:
        return self.options.grad_norm_clip

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The losses of sequences with the tokens that follow them, [n, T + 1].

        Returns:
            (what is trained on, a scalar; cross-entropies [n, T - offset]; right answers, bool of
            the same shape).
        """
        offset = self.options.autoregression_offset
        batch = batch.to(self.device)
        targets = batch[:, 1 + offset :]
        network = self.replica if self.model.training else self.model
        with precision(self.options.data_type, self.device):
            logits = network(batch[:, :-1])[:, offset:]
        losses = token_losses(logits, targets)
        right = logits.detach().argmax(-1) == targets
        if self.options.repetition_weighting:
            weighted = (losses * repetition_weights(targets)).sum(1).mean()
            return weighted, losses, right
        return losses.mean(), losses, right

    @spanned("evaluation")
    @torch.no_grad()
    def evaluate(self, part: str) -> Scores:
        """The scores on "valid" or "test", without dropout and unweighted.

        On the whole part, or on as many sequences at its begin as hold `evaluation_tokens`.
        """
        self.collect_weights()
        length = self.options.sequence_length
        stretches = self.corpus.sequences_of(part, length, self.options.evaluation_tokens)
        if self.options.synthetic_data:
            stretches = random_ids(self.corpus.size, tuple(stretches.shape), self.device)
        self.model.eval()
        sums = Sums()
        batches = stretches.split(self.options.batch_size)
        for batch in batches[self.ranks.rank :: self.ranks.size]:
            _, losses, right = self.losses(batch)
            _add_scores(sums, losses, right)
        self.sum_over_ranks(sums)
        return sums.scores()


def _add_scores(sums: Sums, losses: Tensor, right: Tensor) -> None:
    sums.add(losses.double().sum(), right.sum(), losses.numel())
