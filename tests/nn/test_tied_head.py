"""A sparse embedding and its tied head share one pattern and one set of values."""

import copy
import io

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import dynsparse as ds
from dynsparse.nn import SparseEmbedding, TiedHead
from dynsparse.nn.prune import score_blocks, select_best_blocks

VOCABULARY, FEATURES = 20, 16
BOTH = ["embed", "head"]


class LanguageModel(nn.Module):
    def __init__(self, bias=True, padding_idx=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, FEATURES, padding_idx)
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)).relu())


def build(**options):
    torch.manual_seed(0)
    return LanguageModel(**options).double()


def sparse(density=0.3, start="magnitude", include=("body", *BOTH), model=None, **options):
    model = build() if model is None else model
    return ds.sparsify(model, density, start=start, include=include, verbose=False, **options)


def tokens(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def step(model, ids):
    loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"padding_idx": 3}])
def test_gradient_is_the_sum_of_both_uses(options, block_size):
    model, ids = sparse(model=build(**options), block_size=block_size), tokens(4, 9)
    assert type(model.embed) is SparseEmbedding
    assert type(model.head) is TiedHead
    assert model.head.table is model.embed
    dense = ds.densify(copy.deepcopy(model))
    assert type(dense.head) is nn.Linear
    assert dense.head.weight is dense.embed.weight
    assert dense.embed.padding_idx == options.get("padding_idx")
    torch.testing.assert_close(step(model, ids), step(dense, ids))
    pattern = model.embed.pattern
    torch.testing.assert_close(model.embed.values.grad, pattern.values_of(dense.head.weight.grad))
    if model.head.bias is not None:
        torch.testing.assert_close(model.head.bias.grad, dense.head.bias.grad)


def test_training_equals_masked_dense_layers():
    model = sparse()
    reference = ds.densify(copy.deepcopy(model))
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (model, reference)]
    trainer = ds.RigL(model, optimizers[0], total_steps=100, update_interval=5, drop_fraction=0.3)
    for i in range(12):
        ids = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(i))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.testing.assert_close(step(model, ids), step(reference, ids))
        before = {name: getattr(model, name).pattern for name in ("embed", "body")}
        gradient = reference.embed.weight.grad.clone()
        for name, pattern in before.items():
            getattr(reference, name).weight.grad.mul_(pattern.to_mask())
        optimizers[1].step()
        rewirings = trainer.step()
        if not rewirings:
            continue
        grown = rewirings["embed"].after.flat[rewirings["embed"].grown]
        scores = gradient.abs().flatten()
        scores[before["embed"].flat] = -1
        assert torch.equal(grown, scores.topk(len(grown)).indices.sort().values)
        for name in before:  # the reference takes over the new patterns, with zeros where it grew
            layer, sparse_layer = getattr(reference, name), getattr(model, name)
            with torch.no_grad():
                layer.weight.mul_(sparse_layer.pattern.to_mask())
            moments = optimizers[1].state[layer.weight]
            kept = before[name].to_mask() & sparse_layer.pattern.to_mask()
            for moment in ("exp_avg", "exp_avg_sq"):
                moments[moment].mul_(kept)
    assert trainer.updates == 2
    torch.testing.assert_close(model.embed.to_dense(), reference.embed.weight)


def test_files(tmp_path):
    model, ids = sparse(), tokens(2, 5)
    assert [k for k in model.state_dict() if "head" in k] == ["head.bias"]
    ds.save_safetensors(model, tmp_path / "model.safetensors")
    loaded = ds.load_pretrained(build(), tmp_path / "model.safetensors")
    assert loaded.head.table is loaded.embed
    assert torch.equal(loaded(ids), model(ids))
    other = sparse(start="random")
    ds.load_safetensors(other, tmp_path / "model.safetensors")
    assert torch.equal(other(ids), model(ids))
    untied = build()
    untied.head.weight = nn.Parameter(untied.head.weight.clone())
    with pytest.raises(ValueError, match=r"'head\.weight' is only in the model"):
        ds.load_pretrained(untied, tmp_path / "model.safetensors")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copied = torch.load(buffer, weights_only=False)
    assert copied.head.table is copied.embed
    assert torch.equal(copied(ids), model(ids))


def test_checkpoint_with_zeros():
    dense = ds.densify(sparse())
    expected, zeros = dense(tokens(2, 5)), dense.embed.weight == 0
    model = ds.sparsify(dense, start="nonzero", include=["body", *BOTH], verbose=False)
    assert torch.equal(model.embed.to_dense() == 0, zeros)
    torch.testing.assert_close(model(tokens(2, 5)), expected)


def test_wanda_uses_the_inputs_of_the_head():
    dense, batches = build(), [tokens(4, 9), tokens(2, 3)]
    model = sparse(include=BOTH, start="wanda", calibration=batches, model=copy.deepcopy(dense))
    with torch.no_grad():
        hidden = torch.cat([dense.body(dense.embed(ids)).relu().flatten(0, 1) for ids in batches])
        scores = score_blocks(dense.embed.weight, hidden.square().sum(0), 1)
    expected = select_best_blocks(scores, model.embed.pattern.nnz, per_row=True)
    assert torch.equal(model.embed.pattern.flat, expected)


def test_sparsegpt_of_a_tied_table():
    model = sparse(start="sparsegpt", calibration=[tokens(4, 9)])
    assert model.embed.density == pytest.approx(0.3, abs=0.01)
    assert model.head.table is model.embed


def test_sparsify_twice_with_different_densities():
    """The transformer blocks at one density, the vocabulary at another."""
    model = ds.sparsify(build(), 0.2, verbose=False)
    assert type(model.head) is nn.Linear
    sparse(0.5, model=model, include=BOTH)
    assert model.body.density == pytest.approx(0.2, abs=0.01)
    assert model.embed.density == 0.5
    with pytest.raises(ValueError, match="are sparse already"):
        ds.sparsify(model, 0.2)


def test_embedding_without_a_head():
    model = nn.Sequential(nn.Embedding(VOCABULARY, FEATURES), nn.Linear(FEATURES, 4))
    with pytest.raises(ValueError, match=r"an nn\.Embedding named in full can"):
        ds.sparsify(copy.deepcopy(model), 0.5, include=["0*"])
    ds.sparsify(model, 0.5, include=["0"], verbose=False)
    assert type(model[0]) is SparseEmbedding
    assert type(model[1]) is nn.Linear


def test_unsupported_tables_raise():
    model = build()
    model.embed.max_norm = 1.0
    with pytest.raises(ValueError, match=r"'embed' \(Embedding\), which cannot be made sparse"):
        ds.sparsify(model, 0.5, include=BOTH)


def test_heads_with_separate_biases():
    model = build()
    model.second = nn.Linear(FEATURES, VOCABULARY, dtype=torch.float64)
    model.second.weight = model.embed.weight
    biases = model.head.bias, model.second.bias
    sparse(model=model, include=[*BOTH, "second"])
    assert (model.head.bias, model.second.bias) == biases
    assert model.head.table is model.second.table is model.embed


def test_weight_of_the_head_uses_sparse_products():
    model, x = sparse(), torch.randn(3, FEATURES, dtype=torch.float64)
    head = model.head
    assert (head.in_features, head.out_features) == (FEATURES, VOCABULARY)
    assert head.weight.shape == (VOCABULARY, FEATURES)
    torch.testing.assert_close(functional.linear(x, head.weight, head.bias), head(x))
    assert "in_features=16, out_features=20, bias=True" in repr(head)


def test_traced_and_compiled():
    model, ids = sparse(), tokens(2, 5)
    traced = fx.symbolic_trace(model)
    assert torch.equal(traced(ids), model(ids))
    program = torch.export.export(model, (ids,))
    torch.testing.assert_close(program.module()(ids), model(ids))


def test_densify_of_a_head_without_its_table_raises():
    model = nn.Sequential(sparse().head, nn.Linear(4, 4))
    with pytest.raises(ValueError, match="the table of the head '0' is not in this model"):
        ds.densify(model)
    assert type(model[0]) is TiedHead
