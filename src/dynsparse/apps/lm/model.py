"""A causal transformer language model in the manner of GPT-2: network, size, loss, sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynsparse.apps.common.training import precision, replace_sparse, widen
from dynsparse.apps.lm.options import Options
from dynsparse.nn import SparseLinear, SparseTransformerLayer, TiedEmbedding
from dynsparse.training.algorithms import BY_NAME


class LanguageModel(nn.Module):
    """Token vectors plus learned positions, pre-norm layers, a norm, logits through the same table.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    Every matrix of the layers is sparse, even at density 1; the token table is dense unless
    `sparse_embeddings`; norms, biases and positions are dense. `embedding_size` is the width of a
    narrow table, which two sparse layers bring to the hidden size and back (see `TiedEmbedding`).

    Args:
        options: the sizes and the sparsity. With method "dense" the sparse layers hold next to
            nothing: `build_model` replaces them.
        vocabulary: how many tokens there are.
        generator: draws patterns and values of what is sparse.

    Raises:
        ValueError: what the layers raise.
    """

    def __init__(self, options: Options, vocabulary: int, generator: torch.Generator) -> None:
        super().__init__()
        dense = options.method == "dense"
        dtype = torch.float64 if options.data_type == "float64" else torch.float32
        hidden, density = options.hidden_size, 1 - options.sparsity
        sparse: dict[str, Any] = {
            # One block is the least that a sparse layer holds.
            "density": 1e-12 if dense else density,
            "block_size": 1 if dense else options.block_size,
            "generator": generator,
            "dtype": dtype,
        }
        narrow = options.embedding_size
        self.embedding = TiedEmbedding(
            vocabulary,
            hidden if narrow is None else narrow,
            None if narrow is None else hidden,
            table_density=density if options.sparse_embeddings and not dense else 1.0,
            **sparse,
        )
        self.positions = nn.Parameter(torch.empty(options.sequence_length, hidden, dtype=dtype))
        nn.init.normal_(self.positions, std=0.02, generator=generator)
        self.dropout = nn.Dropout(options.droprate)
        self.layers = nn.ModuleList(
            SparseTransformerLayer(
                hidden,
                options.heads,
                options.ff_size,
                head_dim=options.qkv_size,
                interleaved=options.interleave_heads,
                matched=options.match_blocks,
                dropout=options.droprate,
                **sparse,
            )
            for _ in range(options.layers)
        )
        self.norm = nn.LayerNorm(hidden, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [batch, tokens], at most sequence_length of them -> logits [batch, tokens, V].

        The logits at a token depend on it and on those before it.
        """
        x = self.dropout(self.embedding(ids) + self.positions[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x, is_causal=True)
        return self.embedding.logits(self.norm(x))

    @property
    def sequence_length(self) -> int:
        return len(self.positions)


def build_model(options: Options, vocabulary: int, generator: torch.Generator) -> LanguageModel:
    """The model of `options`, drawn from `generator` and, for a dense table, torch's global one.

    Dense models are the same modules with an `nn.Linear` wherever a sparse layer would be.
    """
    model = LanguageModel(options, vocabulary, generator)
    if options.method == "dense":
        replace_sparse(model, partial(_make_dense_layer, generator=generator))
    scale_matrices(model, options.initial_scale)
    return model


@torch.no_grad()
def scale_matrices(model: LanguageModel, factor: float) -> None:
    """Start the matrices, apart from the token table, at `factor` times what their layers draw."""
    for module in model.modules():
        if module is model.embedding.table:
            continue
        if isinstance(module, SparseLinear):
            module.values.mul_(factor)
        elif isinstance(module, nn.Linear):
            module.weight.mul_(factor)


def _make_dense_layer(layer: SparseLinear, generator: torch.Generator) -> nn.Linear:
    """A dense layer in place of a sparse one, initialised as `nn.Linear` is."""
    linear = nn.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        dtype=layer.values.dtype,
    )
    bound = layer.in_features**-0.5
    nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    if layer.bias is not None:
        if bool(layer.bias.any()):
            nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
        else:  # the attention's start at zero
            nn.init.zeros_(linear.bias)
    return linear


# The index tensors of a block (int32), and what the kernels for single elements make of them.
_INDEX_BYTES = 6 * 4 + 12


def _matrices(options: Options) -> list[tuple[int, int, int]]:
    """(out, in, count) of the sparse matrices, apart from the token table; each has a bias."""
    hidden, inner, ff = options.hidden_size, options.inner_size, options.ff_size
    layers = options.layers
    matrices = [
        (inner, hidden, 3 * layers),
        (hidden, inner, layers),
        (ff, hidden, layers),
        (hidden, ff, layers),
    ]
    if options.embedding_size is not None:
        matrices += [(hidden, options.embedding_size, 1), (options.embedding_size, hidden, 1)]
    return matrices


def count_parameters(options: Options, vocabulary: int, *, first: bool = False) -> tuple[int, int]:
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
    for out, into, copies in _matrices(options):
        weights = out * into
        if sparse:
            present = max(1, round(density * (weights // edge**2)))
            weights = present * edge**2
            blocks += copies * present
        total += copies * (weights + out)
    norms = 2 * options.hidden_size * (2 * options.layers + 1) + 2 * (options.embedding_size or 0)
    positions = options.sequence_length * options.hidden_size
    return total + table + norms + positions, blocks


def match_parameters_of(options: Options, vocabulary: int) -> Options:
    """Narrow dense options with `match_parameters` to as many parameters as the sparse model has.

    Layers, heads, vocabulary, sequence length and a factorised table's width stay. Of all hidden
    sizes that the heads divide, each with the feed-forward size that meets the number best, the one
    whose proportion of the two is nearest that of the sparse model.

    Raises:
        ValueError: no dense model is small enough.
    """
    if not options.match_parameters:
        return options
    # "static" stands for the sparse model: all methods hold the same number.
    target, _ = count_parameters(dataclasses.replace(options, method="static"), vocabulary)
    proportion = options.ff_size / options.hidden_size
    best: tuple[float, Options] | None = None
    step = options.heads if options.qkv_size is None else 1
    for hidden in range(step, options.hidden_size + 1, step):
        qkv = options.qkv_size
        if qkv is not None:
            qkv = max(1, round(qkv * hidden / options.hidden_size))
        sizes: dict[str, Any] = {"hidden_size": hidden, "qkv_size": qkv}
        count, _ = count_parameters(dataclasses.replace(options, **sizes, ff_size=1), vocabulary)
        ff = 1 + round((target - count) / (options.layers * (2 * hidden + 1)))
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


def state_bytes(options: Options, vocabulary: int) -> int:
    """Bytes of weights, gradients, optimizer state and patterns, at the start of the training.

    Activations are not counted.
    """
    bytes_each = 8 if options.data_type == "float64" else 4
    count, blocks = count_parameters(options, vocabulary, first=True)
    slots = {"Adam": 2, "Momentum": 1, "GradientDescent": 0}[options.optimizer]
    return count * bytes_each * (2 + slots) + blocks * _INDEX_BYTES


def check_memory(needed: int, available: int | None) -> None:
    """Raise ValueError if `needed` bytes are more than are available; None is unknown."""
    if available is not None and needed > available:
        raise ValueError(
            f"expected a model that fits the {available / 2**30:.1f} GiB of memory that are free, "
            f"got one that takes about {needed / 2**30:.1f} GiB: lower the sizes or "
            "--vocabulary-size, or raise --sparsity"
        )


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of every token in nats: logits [n, T, V], targets [n, T] -> [n, T]."""
    flat = widen(logits).flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), reduction="none").view_as(targets)


def repetition_weights(targets: Tensor) -> Tensor:
    """Weights [n, T], rows summing to 1, that count every distinct token of a sequence alike.

    The weight of a token is 1 / how often the sequence has it, as in the language model of
    Graphcore's dynamic sparsity application, over the number of distinct tokens: so every sequence
    counts the same, and micro-batches add up to the batch.
    """
    order = targets.sort(1)
    begins = torch.ones_like(order.values, dtype=torch.bool)
    begins[:, 1:] = order.values[:, 1:] != order.values[:, :-1]
    group = begins.cumsum(1) - 1
    counts = torch.zeros_like(targets).scatter_add_(1, group, torch.ones_like(targets))
    sorted_weights = 1.0 / (counts.gather(1, group) * begins.sum(1, keepdim=True))
    return torch.empty_like(sorted_weights).scatter_(1, order.indices, sorted_weights)


@torch.no_grad()
def sample(
    model: LanguageModel,
    prompt: Tensor,
    count: int,
    generator: torch.Generator,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    data_type: str = "float32",
) -> Iterator[int]:
    """`count` ids that go on from `prompt` [tokens]; the model sees the last of them that fit.

    The model is left in evaluation.

    Args:
        generator: on the CPU, where the tokens are drawn.
        temperature: of the softmax; 0 always takes the likeliest.
        top_k: how many of the likeliest are in the draw; defaults to all.
    """
    model.eval()
    device = next(model.parameters()).device
    ids = prompt[None, -model.sequence_length :].long()
    for _ in range(count):
        with precision(data_type, device):
            logits = model(ids.to(device))[0, -1]
        chosen = choose(logits.double().cpu(), generator, temperature, top_k)
        yield int(chosen)
        ids = torch.cat([ids, chosen.view(1, 1)], 1)[:, -model.sequence_length :]


def choose(
    logits: Tensor, generator: torch.Generator, temperature: float, top_k: int | None
) -> Tensor:
    """Draw an id from logits [V]."""
    if temperature == 0:
        return logits.argmax()
    if top_k is not None and top_k < len(logits):
        highest = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(0, highest.indices, highest.values)
    # The largest first comes to 0: a tiny temperature cannot overflow.
    shares = ((logits - logits.max()) / temperature).softmax(0)
    return torch.multinomial(shares, 1, generator=generator)[0]
