"""Tensor-parallel layers equal the full layers: outputs, gradients, states; and errors."""

from __future__ import annotations

import contextlib
import copy
from importlib import import_module

import pytest
import torch
from fake_ranks import in_threads
from grids import GRIDS, on_grid
from split_runs import check_gradients
from torch import nn

import dynsparse as ds
from dynsparse.distributed import clip_grad_norm_, gather, split
from dynsparse.distributed.sharded_layer import spec_of
from dynsparse.ranks import DimShard, Placement

BLOCKS = [1, 4, 16]
EXACT = 1e-12


def chain(block_size, density=0.3):
    """Make two consecutive layers with different numbers of input and output features."""
    torch.manual_seed(3)
    options = {"block_size": block_size, "dtype": torch.float64}
    return nn.Sequential(
        ds.nn.SparseLinear(48, 96, density, **options),
        nn.Tanh(),
        ds.nn.SparseLinear(96, 64, density, **options),
    )


@contextlib.contextmanager
def override_placements(placements):
    """Override the placements that `split` chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            import_module("dynsparse.distributed.distribute"),
            "place_layers",
            lambda chain, borders, grid: {
                name: placements[name] for bundle in chain for name in bundle.names
            },
        )
        yield


def samples(x, grid):
    return x.chunk(grid.z.size)[grid.z.rank]


def passes(model, x, dy):
    """Return y, the gradient of x, and the gradients of the parameters by name."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


def compare_with_full(model, sizes, x, dy):
    y, dx, grads = passes(model, x, dy)
    model.zero_grad()

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        got, got_dx, got_grads = passes(own, samples(x, grid), samples(dy, grid))
        torch.testing.assert_close(got, samples(y, grid), rtol=0, atol=EXACT)
        torch.testing.assert_close(got_dx, samples(dx, grid), rtol=0, atol=EXACT)
        for grad in got_grads.values():
            grid.z.sum(grad)
        # Whole layers with the gradients for values are gathered as any others.
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                parameter.copy_(got_grads[name])
        whole = copy.deepcopy(model)
        whole.load_state_dict(gather(own))
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(
                parameter, grads[name], rtol=0, atol=EXACT, check_dtype=False
            )
        return [m.pattern.nnz for m in own.modules() if isinstance(m, ds.nn.SparseLinear)]

    return on_grid(sizes, work)


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("sizes", GRIDS)
def test_chain_of_two_layers_equals_one_process(sizes, block_size):
    model = chain(block_size)
    x, dy = torch.randn(8, 48).double(), torch.randn(8, 64).double()
    held = compare_with_full(model, sizes, x, dy)
    parts = sizes[0] * sizes[1]
    if block_size == 1:
        for layer in (0, 1):
            mean = sum(of[layer] for of in held.values()) / len(held)
            assert max(of[layer] for of in held.values()) < 1.15 * mean
            assert sum(of[layer] for of in held.values()) == sizes[2] * model[2 * layer].pattern.nnz
    assert parts == 1 or max(of[0] for of in held.values()) < model[0].pattern.nnz


WAYS = {
    "rows, gathered in between": {"0": ("x", None, None, False), "2": (None, None, "x", True)},
    "columns alone": {"0": (None, "x", None, False), "2": (None, "y", None, True)},
    "a pair": {"0": ("x", None, None, False), "2": (None, "x", "x", True)},
    "other axes": {"0": ("x", "y", None, False), "2": ("x", "y", "x", True)},
    "rows of both": {"0": ("y", None, None, False), "2": ("x", None, "y", True)},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_placement_equals_one_process(way):
    model = chain(4)
    x, dy = torch.randn(3, 2, 48).double(), torch.randn(3, 2, 64).double()
    sizes = (2, 2, 1)
    with override_placements({k: Placement(*v) for k, v in WAYS[way].items()}):
        compare_with_full(model, sizes, x, dy)


def test_pair_reduces_once_forward_and_once_backward():
    model = chain(1)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        calls, sent = grid.x.calls, grid.x.sent
        y = own(torch.randn(8, 48).double().requires_grad_())
        assert (grid.x.calls - calls, grid.x.sent - sent) == (1, 8 * 64 * 8)
        y.sum().backward()
        assert (grid.x.calls - calls, grid.x.sent - sent) == (2, 8 * 64 * 8 + 8 * 48 * 8)

    on_grid((2, 1, 1), work)


@pytest.mark.parametrize("average", [True, False, None])
def test_attention_split_by_heads_equals_one_process(average):
    torch.manual_seed(1)
    model = ds.nn.SparseMultiheadAttention(
        24, 3, density=0.4, batch_first=True, add_bias_kv=True, dtype=torch.float64
    )
    x = torch.randn(2, 5, 24).double()
    asked = {"need_weights": average is not None, "average_attn_weights": average is not False}
    y, weights = model(x, x, x, **asked)
    (y.sum() + (0 if weights is None else (weights**2).sum())).backward()

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        got, seen = own(x, x, x, **asked)
        torch.testing.assert_close(got, y, rtol=0, atol=EXACT)
        if weights is not None:
            torch.testing.assert_close(seen, weights, rtol=0, atol=EXACT)
        own.zero_grad()
        (got.sum() + (0 if seen is None else (seen**2).sum())).backward()
        state = gather(own)
        for key, tensor in model.state_dict().items():
            assert torch.equal(state[key], tensor), key
        check_gradients(own, model, EXACT)
        return own.num_heads

    assert sorted(on_grid((2, 1, 1), work).values()) == [1, 2]


def test_transformer_layer_equals_one_process():
    torch.manual_seed(2)
    model = ds.nn.SparseTransformerLayer(16, 4, 32, density=0.5, dtype=torch.float64).eval()
    x, dy = torch.randn(4, 3, 16).double(), torch.randn(4, 3, 16).double()
    compare_with_full(model, (2, 2, 1), x, dy)


def test_copy_of_split_model_computes_the_same():
    model = chain(1)
    x = torch.randn(4, 48).double()

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        assert torch.equal(copy.deepcopy(own)(x), own(x))
        assert own[0].kernel(8) == "tensor parallel"
        assert spec_of(own[0]).shape == (96, 48)

    on_grid((2, 1, 1), work)


def error_on_all(sizes, work):
    lines = set()

    def caught(grid):
        with pytest.raises((ValueError, TypeError)) as error:
            work(grid)
        lines.add(str(error.value))

    on_grid(sizes, caught)
    (line,) = lines
    return line


def test_split_errors_are_raised_on_all_ranks():
    model = chain(1)
    sizes = (2, 1, 1)

    def twice(grid):
        split(split(copy.deepcopy(model), grid), grid)

    assert error_on_all(sizes, twice) == "the layer '0' is split already"

    assert "mesh must be a DeviceMesh" in error_on_all(sizes, lambda _: split(model, 2))
    line = error_on_all(sizes, lambda grid: split(nn.Linear(3, 3), grid))
    assert "no sparse layers" in line

    def different(grid):
        own = copy.deepcopy(model)
        with torch.no_grad():
            own[2].values[0] += grid.x.rank
        split(own, grid)

    line = error_on_all(sizes, different)
    assert line.startswith(
        "ranks disagree on layer '2': rank 0 differs from rank 1; make the model"
    )

    def busy(grid):
        own = copy.deepcopy(model)
        own[0].active = ds.nn.active_set.ActiveSet(
            own[0].pattern, torch.arange(3), torch.device("cpu")
        )
        split(own, grid)

    assert "'0' is computed by active subset, which computes no shards" in error_on_all(sizes, busy)


def test_wrong_number_of_features_is_rejected():
    model = chain(1)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        with pytest.raises(ValueError, match=r"expected \d+ features on rank \d of the axis 'x'"):
            own[2](torch.randn(4, 96).double())

    on_grid((2, 1, 1), work)


def test_active_subset_of_a_shard_equals_one_process():
    model = chain(4)
    sizes = (2, 2, 1)
    x, dy = torch.randn(8, 48).double(), torch.randn(8, 64).double()
    whole = copy.deepcopy(model)
    for layer in (whole[0], whole[2]):
        every_third = torch.arange(0, layer.pattern.nnz, 3)
        layer.active = ds.nn.active_set.ActiveSet(layer.pattern, every_third, torch.device("cpu"))
    y, dx, grads = passes(whole, x, dy)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        for name in (0, 2):
            layer = own[name]
            slots, _ = spec_of(layer).slots(layer.pattern)
            mine = (slots % 3 == 0).nonzero().flatten()
            layer.active = ds.nn.active_set.ActiveSet(layer.pattern, mine, torch.device("cpu"))
            assert torch.equal(layer.active.slots, mine)
        got, got_dx, got_grads = passes(own, x, dy)
        torch.testing.assert_close(got, y, rtol=0, atol=EXACT)
        torch.testing.assert_close(got_dx, dx, rtol=0, atol=EXACT)
        for name in (0, 2):
            slots, _ = spec_of(own[name]).slots(own[name].pattern)
            torch.testing.assert_close(
                got_grads[f"{name}.values"], grads[f"{name}.values"][slots], rtol=0, atol=EXACT
            )
            own[name].set_pattern(own[name].pattern)
            assert own[name].active is None
            assert spec_of(own[name]) is not None

    on_grid(sizes, work)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_along_any_dimension(dim):
    """With uneven shards of a non-contiguous tensor."""
    borders = (0, 3, 4, 9)
    whole = torch.randn(9, 9, 9).transpose(0, 2)

    def work(ranks):
        shard = DimShard(ranks, borders)
        return shard.all_gather(shard.narrow(whole, dim), dim)

    for found in in_threads(3, work):
        assert torch.equal(found, whole)


class WithAttention(nn.Module):
    """Sparse layers that `split` divides, with biases of the shards' rows, and dense ones."""

    def __init__(self):
        super().__init__()
        self.chain = chain(4)
        self.dense = nn.Linear(64, 48, dtype=torch.float64)
        self.attention = ds.nn.SparseMultiheadAttention(
            48, 4, density=0.3, add_bias_kv=True, batch_first=True, dtype=torch.float64
        )

    def forward(self, x):
        x = self.dense(self.chain(x))
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("sizes", GRIDS)
def test_clipped_gradients_equal_one_process(sizes, max_norm):
    torch.manual_seed(0)
    whole, x = WithAttention(), torch.randn(4, 3, 48).double()
    model = copy.deepcopy(whole)
    whole(x).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        own(samples(x, grid)).square().sum().backward()
        for parameter in own.parameters():
            grid.z.sum(parameter.grad)
        norm = clip_grad_norm_(own, max_norm)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        check_gradients(own, whole, 1e-11)

    on_grid(sizes, work)
