"""A whole model like GPT-2 medium: time and memory of a training step, and 500 steps.

Linear layers inside the transformer's blocks are sparse; embeddings, norms and the head are dense.
A dense model runs beside it. All are compiled and use bfloat16 autocast, float32 weights and AdamW.
With `--tokens FILE` (uint16, as nanoGPT's `train.bin`) they train on that text, without it on
random tokens that mostly follow from the previous one.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import dynsparse as ds
from gpu_parts.run import Call, Run
from gpu_parts.steps import masked


class Block(nn.Module):
    """Attention and feed-forward part, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Loss(nn.Module):
    """The loss from the last activations, for tokens [n, length + 1]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class GPT(nn.Module):
    """Returns the loss of a batch of tokens [n, length + 1]."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.loss = Loss(vocabulary, width)
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)
        self.loss.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.loss(x, tokens)


class Text:
    """Batches of tokens, the same for every model."""

    def __init__(self, run: Run, vocabulary: int, length: int, batch: int) -> None:
        self.shape, self.device = (batch, length + 1), run.device
        self.vocabulary = vocabulary
        self.tokens = None
        if run.tokens is not None:
            self.tokens = np.memmap(Path(run.tokens), dtype=np.uint16, mode="r")
            if int(self.tokens[: 1 << 20].max()) >= vocabulary or len(self.tokens) <= length + 1:
                raise ValueError(
                    f"--tokens must hold more than {length + 1} numbers under {vocabulary}"
                )

    def batch(self, seed: int) -> Tensor:
        batch, length = self.shape
        generator = torch.Generator().manual_seed(seed)
        if self.tokens is not None:
            starts = torch.randint(len(self.tokens) - length, (batch,), generator=generator)
            found = np.stack(
                [self.tokens[s : s + length].astype(np.int64) for s in starts.tolist()]
            )
            return torch.from_numpy(found).to(self.device)
        # Three of four tokens are a function of the previous one.
        tokens = torch.randint(self.vocabulary, self.shape, generator=generator)
        known = torch.rand(self.shape, generator=generator) < 0.75
        for i in range(1, length):
            after = (tokens[:, i - 1] * 31 + 7) % self.vocabulary
            tokens[:, i] = torch.where(known[:, i], after, tokens[:, i])
        return tokens.to(self.device)


def _sizes(run: Run) -> tuple[dict[str, int], int]:
    if run.small:
        return {"vocabulary": 97, "length": 16, "width": 64, "heads": 2, "layers": 1}, 2
    return {"vocabulary": 50304, "length": 1024, "width": 1024, "heads": 16, "layers": 24}, 8


def _sparse(dense: nn.Module, density: float, b: int) -> nn.Module:
    return ds.sparsify(
        copy.deepcopy(dense), density, b, "uniform", exclude=["loss.head"], verbose=False
    )


def _step(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    advance: Call,
    mode: str = "default",
) -> Callable:
    # Block by block: the whole model takes minutes to compile, and all blocks share the code.
    how = {"backend": "aot_eager"} if run.interpreted else {"mode": mode}
    for part in model.modules():
        if isinstance(part, (Block, Loss)):
            part.compile(**how)

    def step(tokens: Tensor) -> Tensor:
        if mode != "default":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(run.device.type, torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        advance()
        optimizer.zero_grad()
        return loss.detach().clone()  # a CUDA graph overwrites its outputs

    return step


def _adam(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    fused = not run.interpreted
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=fused)


def step_of_a_model(run: Run) -> None:
    """Compiled dense beside compiled sparse: a whole step, its peak memory, and its host time."""
    sizes, batch = _sizes(run)
    default, graphs = "default", "reduce-overhead"
    cases = [(0, 1.0, default), *((b, d, default) for b in (64, 128) for d in (0.1, 0.2))]
    cases += [(0, 1.0, graphs), (64, 0.1, graphs), (128, 0.1, graphs)]
    if run.small:
        cases = [(0, 1.0, default), (16, 0.5, default)]
    _steps_of(run, "GPT-2 medium", sizes, batch, cases)
    if not run.small:
        wide = sizes | {"width": 2048, "layers": 12}
        cases = [
            (b, d, how) for how in (default, graphs) for b, d in ((0, 1.0), (64, 0.1), (128, 0.1))
        ]
        _steps_of(run, "12 layers of 2048", wide, batch, cases)


def _steps_of(
    run: Run, what: str, sizes: dict[str, int], batch: int, cases: list[tuple[int, float, str]]
) -> None:
    torch.manual_seed(0)
    dense = GPT(**sizes)
    tokens = Text(run, sizes["vocabulary"], sizes["length"], batch).batch(0)
    base = None
    for b, density, mode in cases:
        model = (copy.deepcopy(dense) if not b else _sparse(dense, density, b)).to(run.device)
        optimizer = _adam(run, model)
        step = _step(run, model, optimizer, optimizer.step, mode)
        for _ in range(1 if run.small else 5):
            step(tokens)
        if not run.interpreted:
            torch.cuda.reset_peak_memory_stats()
        us = run.wall(lambda step=step: step(tokens), 20)
        peak = 0 if run.interpreted else torch.cuda.max_memory_allocated()
        base = base or (us, max(1, peak))
        name = f"blocks of {b}, density {density:g}" if b else "dense"
        name += "" if mode == "default" else f", {mode}"
        run.note(f"a compiled step of {what}, {name}", us=us, over_dense=base[0] / us,
                 host=run.host(lambda step=step: step(tokens), 5), peak_MB=peak / 1e6,
                 of_dense=peak / base[1], parameters=sum(p.numel() for p in model.parameters()),
                 )  # fmt: skip
        if b and mode == "default":
            run.note(
                f"where the host is in it, {name}", of=run.profile(lambda step=step: step(tokens))
            )
        del model, optimizer, step
        torch.compiler.reset()


def training(run: Run) -> None:
    """RigL beside the dense model, and the dense model with RigL's initial masks, as CUDA graphs;
    steps with an update run eagerly."""
    sizes, batch = _sizes(run)
    steps, b, density = (4, 16, 0.5) if run.small else (500, 64, 0.2)
    text = Text(run, sizes["vocabulary"], sizes["length"], batch)
    batches = [text.batch(i) for i in range(steps)]
    torch.manual_seed(0)
    dense = GPT(**sizes)
    sparse = _sparse(dense, density, b)
    for name, made in (("RigL", sparse), ("dense", dense), ("masked", masked(sparse))):
        model = copy.deepcopy(made).to(run.device)
        optimizer = _adam(run, model)
        advance: Call = optimizer.step
        trainer = None
        if name == "RigL":
            interval = max(1, min(50, steps // 4))
            trainer = ds.RigL(model, optimizer, total_steps=steps, update_interval=interval)
            advance = trainer.step
        step = _step(run, model, optimizer, advance, "reduce-overhead")
        losses, begin = [], 0.0
        for i, tokens in enumerate(batches):
            if i == min(5, steps - 1):  # compiled by now
                run.wait()
                begin = time.perf_counter()
            due = trainer is not None and trainer.schedule.is_due(trainer.steps + 1)
            with torch.compiler.set_stance("force_eager" if due else "default"):
                losses.append(step(tokens))
        run.wait()
        us = (time.perf_counter() - begin) / (steps - min(5, steps - 1)) * 1e6
        values = [float(loss) for loss in losses]
        last = statistics.fmean(values[-max(1, steps // 20) :])
        run.note(f"{steps} steps, {name}", us=us, first_loss=values[0], last_loss=last,
                 updates=trainer.updates if trainer else 0,
                 losses=values[:: max(1, steps // 20)])  # fmt: skip
        del model, optimizer, step, trainer
        torch.compiler.reset()


SECTIONS: dict[str, Callable[[Run], None]] = {"model": step_of_a_model, "training": training}
