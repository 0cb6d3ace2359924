"""How large a language model is before it is made: parameters, bytes, and a dense match."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynsparse.apps.lm.options import Options
from dynsparse.training.algorithms import BY_NAME

_PROJECTIONS = 4
_INDEX_BYTES = 5 * 4  # the five int32 index tensors of a sparse layer have at most one entry each
_PATTERN_BYTES = 4  # rows in row-major order, while somebody looks at them
_PANEL_BYTES = 2 + 10  # what the kernels for single elements make of the index (ops/linear/panels)
# What a step takes at its peak over what the layers keep: the gradients of activations, and copies
# in the layout of the kernels. Measured: 1.6 to 1.8.
_PEAK = 1.7


@dataclass(frozen=True)
class _Matrix:
    """A matrix of the layers; `copies` of it."""

    out: int
    into: int
    bias: bool
    copies: int


def _matrices(options: Options) -> list[_Matrix]:
    """All that is sparse in the sparse model, apart from the table."""
    hidden, inner, ff = options.hidden_size, options.inner_size, options.ff_size
    layers = options.layers
    found = [
        _Matrix(inner, hidden, True, (_PROJECTIONS - 1) * layers),
        _Matrix(hidden, inner, True, layers),
        _Matrix(ff, hidden, True, layers),
        _Matrix(hidden, ff, True, layers),
    ]
    if options.embedding_size is not None:
        found.append(_Matrix(hidden, options.embedding_size, True, 1))
        found.append(_Matrix(options.embedding_size, hidden, True, 1))
    return found


def _blocks(out: int, into: int, density: float, block_size: int) -> int:
    return max(1, round(density * (out * into // block_size**2)))


def parameters(options: Options, vocabulary: int, *, first: bool = False) -> tuple[int, int]:
    """(parameters, blocks in sparse layers) of the model that the options give, zeros left out.

    At the end of the training, or with `first` at its begin, which may be denser.
    """
    sparse = options.method != "dense"
    density = 1 - options.sparsity
    if sparse and first:
        density = BY_NAME[options.method].first_density(density)
    edge = options.block_size
    table = vocabulary * (options.embedding_size or options.hidden_size)
    total = blocks = 0
    if sparse and options.sparse_embeddings:
        table = max(1, round(density * table))
        blocks += table
    for matrix in _matrices(options):
        weights = matrix.out * matrix.into
        if sparse:
            count = _blocks(matrix.out, matrix.into, density, edge)
            weights = count * edge**2
            blocks += matrix.copies * count
        total += matrix.copies * (weights + matrix.out * matrix.bias)
    norms = 2 * options.hidden_size * (2 * options.layers + 1) + 2 * (options.embedding_size or 0)
    positions = options.sequence_length * options.hidden_size
    return total + table + norms + positions, blocks


def matched(options: Options, vocabulary: int) -> Options:
    """With `match_parameters`, the dense options narrowed to the sparse model's parameters.

    Layers, heads, vocabulary, sequence length and a factorised table's width stay. Of all hidden
    sizes that the heads divide, each with the feed-forward size that meets the number best, the one
    whose proportion of the two is nearest that of the sparse model.

    Raises:
        ValueError: no dense model is small enough.
    """
    if not options.match_parameters:
        return options
    # "static" stands for the sparse model: all methods hold the same number.
    target, _ = parameters(dataclasses.replace(options, method="static"), vocabulary)
    proportion = options.ff_size / options.hidden_size
    best: tuple[float, Options] | None = None
    step = options.heads if options.qkv_size is None else 1
    for hidden in range(step, options.hidden_size + 1, step):
        qkv = options.qkv_size
        if qkv is not None:
            qkv = max(1, round(qkv * hidden / options.hidden_size))
        sizes: dict[str, Any] = {"hidden_size": hidden, "qkv_size": qkv}
        one, _ = parameters(dataclasses.replace(options, **sizes, ff_size=1), vocabulary)
        ff = 1 + round((target - one) / (options.layers * (2 * hidden + 1)))
        if ff < 1:
            break
        distance = abs(ff / hidden - proportion)
        if best is None or distance < best[0]:
            best = distance, dataclasses.replace(options, **sizes, ff_size=ff)
    if best is None:
        raise ValueError(
            f"--match-parameters: no dense model with {options.heads} heads has as few as "
            f"{target:,} parameters: lower --heads, --layers or --sparsity"
        )
    return best[1]


@dataclass(frozen=True)
class Memory:
    """Bytes: of weights, gradients and optimizer state; of patterns; of the work of one step."""

    state: int
    pattern: int
    work: int

    @property
    def total(self) -> int:
        return self.state + self.pattern + self.work


def estimate_memory(options: Options, vocabulary: int) -> Memory:
    """What training the model of the options takes, before anything of it is made.

    State and pattern are counted. The work is estimated from what the layers keep for the backward
    pass of one micro-batch, and the two gradients of a dense table, which meet in their sum.
    """
    bytes_each = 8 if options.data_type == "float64" else 4
    count, blocks = parameters(options, vocabulary, first=True)
    slots = {"Adam": 2, "Momentum": 1, "GradientDescent": 0}[options.optimizer]
    tokens = options.batch_size * options.sequence_length
    hidden, inner, ff = options.hidden_size, options.inner_size, options.ff_size
    # A layer keeps its input, both norms, q, k, v and what they give, both branches, and the
    # feed-forward part before and after gelu; dropout adds a mask and a product.
    dropout = 2 if options.droprate else 1
    per_token = options.layers * (5 * hidden + 4 * inner + 2 * dropout * ff)
    # Logits, their softmax and their gradient.
    per_token += 3 * vocabulary + 4 * hidden
    table = 2 * vocabulary * (options.embedding_size or hidden)
    panels = _PANEL_BYTES if options.block_size == 1 and bytes_each == 4 else 0
    return Memory(
        count * bytes_each * (2 + slots),
        blocks * (_INDEX_BYTES + _PATTERN_BYTES + panels),
        round(_PEAK * tokens * per_token + table) * bytes_each,
    )


def check_memory(needed: Memory, available: int | None = None) -> None:
    """Raise ValueError if `needed` is more than what is available (asked of the system)."""
    available = available_memory() if available is None else available
    if available is not None and needed.total > available:
        raise ValueError(
            f"expected a model that fits the {available / 2**30:.1f} GiB of memory that are free, "
            f"got one that takes about {needed.total / 2**30:.1f} GiB: lower --batch-size, the "
            "sizes or --vocabulary-size, or raise --sparsity"
        )


def available_memory() -> int | None:
    """Bytes that can still be used, or None where the system does not say."""
    free: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except OSError:
        names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
        if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
            free.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:  # a container may allow less than the machine has
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        if limit != "max":
            free.append(int(limit) - int(used))
    except (OSError, ValueError):
        pass
    return min(free) if free else None
