"""Transformers under torch.compile, gradient checkpointing and bf16, with pattern updates.

Each variant must equal plain eager training: losses, gradients and grown patterns.
"""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import dynsparse as ds
from dynsparse.nn import SparseLinear, SparseTransformerLayer, TiedEmbedding


class LanguageModel(nn.Module):
    """Factorized tied embedding and pre-norm layers, optionally with gradient checkpointing."""

    reentrant = None

    def __init__(self, block=1):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.tokens = TiedEmbedding(
            32, 8, features=16, table_density=0.5, density=0.5, block_size=block, generator=g
        )
        self.layers = nn.ModuleList(
            SparseTransformerLayer(
                16, 2, 32, dropout=0.0, density=0.5, block_size=block, generator=g
            )
            for _ in range(2)
        )

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            run = functools.partial(layer, is_causal=True)
            if self.reentrant is None:
                x = run(x)
            else:
                x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.tokens.logits(x)


class Classifier(nn.Module):
    """torch's encoder, sparsified."""

    def __init__(self, block=1):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(32, 16)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 32)
        g = torch.Generator().manual_seed(0)
        ds.sparsify(self, 0.5, block, exclude=["head"], verbose=False, generator=g)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)))


def train(model, forward, steps=8):
    """Return losses and patterns of a training with an update every other step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = ds.RigL(model, optimizer, total_steps=100, update_interval=2, drop_fraction=0.5)
    ids = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = forward(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        trainer.step()
    assert trainer.updates == steps // 2
    return losses, {n: m.pattern for n, m in model.named_modules() if isinstance(m, SparseLinear)}


def agree(got, expected):
    assert got[0] == pytest.approx(expected[0], rel=1e-4)
    assert got[1] == expected[1]


@pytest.mark.parametrize("block", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("make", [LanguageModel, pytest.param(Classifier, marks=pytest.mark.slow)])
def test_updates_do_not_recompile(make, block):
    model, plain = make(block), make(block)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    got = train(model, compiled)
    assert counter.frame_count == 1
    agree(got, train(plain, plain))
    before = [m.pattern for m in make(block).modules() if isinstance(m, SparseLinear)]
    assert sum(a != b for a, b in zip(got[1].values(), before, strict=True)) > len(before) // 2


@pytest.mark.slow
def test_compile_with_inductor():
    model, plain = LanguageModel(4), LanguageModel(4)
    compiled = torch.compile(model, fullgraph=True)
    ids = torch.randint(32, (3, 9))[:, :-1]
    torch.testing.assert_close(compiled(ids), plain(ids))
    # A trainer makes the index larger, by a slot for each entry: once, before its first step.
    agree(train(model, compiled, steps=1), train(plain, plain, steps=1))
    with torch.compiler.set_stance("fail_on_recompile"):
        got = train(model, compiled)
    agree(got, train(plain, plain))


def test_gradient_checkpointing_repeats_the_dropout_mask():
    def run(reentrant):
        model = LanguageModel()
        for layer in model.layers:
            layer.dropout.p = layer.attention.dropout = 0.3
        model.reentrant = reentrant
        torch.manual_seed(5)
        return train(model, model), model.state_dict()

    (expected, state), (got, other) = run(None), run(False)
    assert got == expected
    assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())


@pytest.mark.slow
def test_compile_with_gradient_checkpointing():
    model, plain = LanguageModel(4), LanguageModel(4)
    model.reentrant = False
    counter = CompileCounterWithBackend("aot_eager")
    got = train(model, torch.compile(model, backend=counter))
    assert counter.frame_count == 1
    agree(got, train(plain, plain))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("block", [1, 4])
def test_bf16_autocast_trains(block, compiled):
    model, plain = LanguageModel(block), LanguageModel(block)

    def forward(ids):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids)
        assert logits.dtype == torch.bfloat16
        return logits.float()

    run = torch.compile(forward, backend="aot_eager") if compiled else forward
    losses, patterns = train(model, run, steps=40)
    expected, _ = train(plain, plain, steps=40)
    assert losses[-1] < 0.8 * losses[0]
    assert losses == pytest.approx(expected, rel=0.3, abs=0.2)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert len(patterns) == 15
