"""The language model: causality, sizes, parameters and memory, sparse and dense."""

import dataclasses

import pytest
import torch
from torch import nn

from dynsparse.apps.lm import Options, preset
from dynsparse.apps.lm.model import (
    LanguageModel,
    build_model,
    check_memory,
    count_parameters,
    match_parameters_of,
    repetition_weights,
    state_bytes,
)
from dynsparse.nn import SparseEmbedding, SparseLinear

SIZES = {"layers": 2, "hidden_size": 16, "ff_size": 32, "heads": 4, "sequence_length": 12}
V = 11


def build(**changes) -> LanguageModel:
    options = Options(**{**SIZES, **changes})
    options.check()
    return build_model(options, V, torch.Generator().manual_seed(3))


def ids(count: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(V, (count, length))


@pytest.mark.parametrize("method", ["static", "dense"])
def test_no_token_sees_a_later_one(method):
    model = build(method=method).eval()
    tokens = ids()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % V
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 12, V)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])
    assert not torch.allclose(before[:, 11], after[:, 11])


def test_shorter_text_gives_the_same_logits():
    model = build().eval()
    tokens = ids()
    torch.testing.assert_close(model(tokens)[:, :5], model(tokens[:, :5]))


@pytest.mark.parametrize("changes", [{}, {"embedding_size": 8}, {"qkv_size": 3}], ids=str)
def test_sparse_with_all_weights_equals_dense(changes):
    sparse = build(method="static", sparsity=0.0, data_type="float64", **changes)
    dense = build(method="dense", data_type="float64", **changes)
    with torch.no_grad():
        modules = dict(sparse.named_modules())
        for name, module in dense.named_modules():
            other = modules[name]
            if isinstance(other, SparseLinear):
                assert isinstance(module, nn.Linear)
                module.weight.copy_(other.to_dense())
                module.bias.copy_(other.bias)
            else:
                for key, parameter in module.named_parameters(recurse=False):
                    parameter.copy_(getattr(other, key))
    tokens = ids()
    torch.testing.assert_close(dense(tokens), sparse(tokens), rtol=1e-12, atol=1e-12)


def test_embedding_is_tied_and_factorized():
    model = build(embedding_size=8)
    assert model.embedding.table.weight.shape == (V, 8)
    assert (model.embedding.up.out_features, model.embedding.up.in_features) == (16, 8)
    model(ids()).sum().backward()
    assert model.embedding.table.weight.grad.abs().sum() > 0
    shapes = [list(p.shape) for p in model.parameters()]
    assert shapes.count([V, 8]) == 1
    sparse = build(sparse_embeddings=True)
    assert isinstance(sparse.embedding.table, SparseEmbedding)
    assert sparse.embedding.table.pattern.nnz == round(0.1 * V * 16)


@pytest.mark.parametrize("method", ["static", "dense"])
def test_initial_weights_are_scaled_except_embedding_and_biases(method):
    # dense tables are drawn from the global generator
    torch.manual_seed(0)
    whole = build(method=method, embedding_size=8, sparse_embeddings=True).state_dict()
    torch.manual_seed(0)
    small = build(
        method=method, embedding_size=8, sparse_embeddings=True, initial_scale=0.25
    ).state_dict()
    for name, tensor in whole.items():
        kind = name.rpartition(".")[2]
        scaled = kind in ("values", "weight") and "norm" not in name and "table" not in name
        assert torch.equal(small[name], tensor * 0.25 if scaled else tensor), name


def test_dropout_in_training_only():
    model = build(droprate=0.5)
    tokens = ids()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"method": "dense"}, {"embedding_size": 8}, {"qkv_size": 3, "block_size": 1},
        {"sparse_embeddings": True, "embedding_size": 8}, {"block_size": 8, "sparsity": 0.5},
        {"method": "dense", "embedding_size": 4, "qkv_size": 5},
    ],
    ids=str,
)  # fmt: skip
def test_parameter_count_equals_the_model(changes):
    options = Options(**{**SIZES, **changes})
    model = build(**changes)
    count, blocks = count_parameters(options, V)
    assert count == sum(p.numel() for p in model.parameters())
    sparse = [m for m in model.modules() if isinstance(m, SparseLinear)]
    assert blocks == sum(layer.pattern.nnz for layer in sparse)


@pytest.mark.parametrize(
    "changes",
    [{}, {"hidden_size": 128, "ff_size": 512, "layers": 3}, {"qkv_size": 8, "embedding_size": 32}],
    ids=str,
)
def test_dense_model_of_equal_parameter_count(changes):
    options = Options(**changes, method="dense", match_parameters=True)
    options.check()
    narrow = match_parameters_of(options, 65)
    wanted, _ = count_parameters(dataclasses.replace(options, method="static"), 65)
    got, _ = count_parameters(narrow, 65)
    # off by at most half of what one more feature of the feed-forward parts would add
    assert abs(got - wanted) <= options.layers * (2 * narrow.hidden_size + 1)
    assert narrow.hidden_size < options.hidden_size
    assert narrow.hidden_size % options.heads == 0 or options.qkv_size
    proportion = narrow.ff_size / narrow.hidden_size
    assert proportion == pytest.approx(options.ff_size / options.hidden_size, rel=0.25)
    assert match_parameters_of(Options(), 65) == Options()


def test_missing_dense_equivalent_raises():
    options = Options(
        method="dense", match_parameters=True, hidden_size=64, heads=64, ff_size=1, sparsity=0.99
    )
    with pytest.raises(ValueError, match="no dense model with 64 heads has as few"):
        match_parameters_of(options, 65)


def test_too_little_memory_raises():
    small = state_bytes(preset("tiny"), 65)
    count, blocks = count_parameters(preset("tiny"), 65)
    assert small == 16 * count + 36 * blocks
    assert state_bytes(preset("large"), 50257) > 1 << 30
    check_memory(small, small)
    check_memory(small, None)
    with pytest.raises(ValueError, match=r"expected a model that fits the 1\.0 GiB") as error:
        check_memory((1 << 30) + 1, 1 << 30)
    assert "\n" not in str(error.value)


def test_presets_match_their_sources():
    small, _ = count_parameters(dataclasses.replace(preset("small"), method="dense"), 50257)
    assert small == 124_439_808  # GPT-2 small, positions and biases included
    large = preset("large")
    assert (large.layers, large.hidden_size, large.ff_size, large.inner_size) == (
        45, 1600, 6400, 512,
    )  # fmt: skip
    for name in ("tiny", "small", "large"):
        preset(name).check()
    with pytest.raises(ValueError, match="--preset: expected one of tiny, small, large, got 'xl'"):
        preset("xl")


def test_repeated_tokens_share_one_weight():
    got = repetition_weights(torch.tensor([[5, 7, 5, 5], [1, 2, 3, 4], [9, 9, 9, 9]]))
    third = 1 / 6
    expected = torch.tensor(
        [[third, 0.5, third, third], [0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]
    )
    torch.testing.assert_close(got, expected)
