"""Sparse layers from pruned weights, and pruning by magnitude, Wanda and SparseGPT."""

import copy

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.nn.calibration import sum_inputs
from dynsparse.nn.candidates import find_candidates
from dynsparse.nn.prune import score_blocks, select_best_blocks, sparsegpt


def pruned(*shape, keep, block=1, seed=0):
    """Make a random weight [out, in] with a fraction of about `keep` nonzero blocks."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape[0] // block, shape[1] // block, generator=g) < keep
    mask = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return torch.randn(shape, generator=g) * mask


def linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight = nn.Parameter(weight)
    return layer


def test_pattern_is_that_of_the_nonzeros():
    dense = pruned(16, 16, keep=1.0)
    weights = [pruned(16, 24, keep=0.3), pruned(32, 16, keep=0.9), dense, torch.zeros(16, 32)]
    model = nn.ModuleList([linear(w) for w in weights])
    ds.sparsify(model, start="nonzero", verbose=False)
    assert [isinstance(layer, SparseLinear) for layer in model] == [True, True, False, False]
    for layer, weight in zip(model[:2], weights[:2], strict=True):
        assert torch.equal(layer.to_dense(), weight)
        assert torch.equal(layer.pattern.to_mask(), weight != 0)


@pytest.mark.parametrize("options", [{}, {"keep_sparse": True}, {"block_size": 4}])
def test_layers_of_zeros_alone_stay_dense(options):
    """Such as heads that begin at zero: a layer without weights would never learn."""
    model = nn.Sequential(linear(pruned(16, 16, keep=0.3, block=4)), linear(torch.zeros(8, 16)))
    ds.sparsify(model, start="nonzero", verbose=False, **options)
    assert isinstance(model[0], SparseLinear)
    assert type(model[1]) is nn.Linear
    alone = nn.Sequential(linear(torch.zeros(8, 16)))
    with pytest.raises(ValueError, match="has 1 % zeros or more beside other values"):
        ds.sparsify(alone, start="nonzero", verbose=False, **options)


@pytest.mark.parametrize(
    ("block", "shape", "found"),
    [(1, (16, 16), 1), (2, (16, 16), 1), (4, (16, 24), 4), (16, (64, 32), 16), (24, (48, 48), 8)],
)
def test_block_size_is_detected(block, shape, found):
    weight = pruned(*shape, keep=0.5, block=block)
    model = ds.sparsify(nn.Sequential(linear(weight)), start="nonzero", verbose=False)
    assert model[0].block_size == found
    assert torch.equal(model[0].to_dense(), weight)


def test_given_block_size_stores_zeros():
    weight = pruned(8, 8, keep=1.0)
    weight[:4] = 0
    weight[0, 0] = 1.0
    model = ds.sparsify(nn.Sequential(linear(weight)), block_size=4, start="nonzero", verbose=False)
    assert model[0].pattern.flat.tolist() == [0, 2, 3]
    assert torch.equal(model[0].to_dense(), weight)


def test_blocks_of_grouped_convolutions_stay_within_groups():
    conv = nn.Conv2d(16, 8, 3, groups=2)
    with torch.no_grad():
        conv.weight[:4] = 0
    model = ds.sparsify(nn.Sequential(conv), start="nonzero", verbose=False)
    assert model[0].block_size == 4
    x = torch.randn(2, 16, 5, 5)
    torch.testing.assert_close(model(x), conv(x))


def test_layers_with_few_zeros_stay_dense_by_default():
    weight = pruned(20, 20, keep=1.0)
    weight[0, :2] = 0
    other = pruned(20, 20, keep=0.5)

    def build(**options):
        model = nn.Sequential(linear(weight), linear(other))
        return ds.sparsify(model, start="nonzero", verbose=False, **options)

    assert isinstance(build()[0], nn.Linear)
    kept = build(keep_sparse=True)[0]
    assert kept.pattern.nnz == 398
    assert torch.equal(kept.to_dense(), weight)


def test_report_names_kernel_and_speedup(capsys):
    from dynsparse._core import native

    model = nn.Sequential(
        linear(pruned(512, 512, keep=0.05)), linear(pruned(512, 512, keep=0.9)), nn.Linear(512, 4)
    )
    ds.sparsify(model, start="nonzero")
    printed = capsys.readouterr().out
    assert printed.startswith(str(ds.nn.describe(model, batch=512)))
    head, thin, full, dense, *_ = (line.split() for line in printed.splitlines())
    assert head[-3:] == ["forward", "backward", "speed"]
    assert dense[-3:] == ["-", "-", "-"]
    kinds = [model[0].kernel(512), model[0].kernel(512, backward=True)]
    assert thin[-3:-1] == kinds
    if native.load() is None:
        assert kinds == ["torch", "torch"]
        assert thin[-1] == "-"
        return
    assert float(thin[-1].rstrip("x")) > 1
    assert float(full[-1].rstrip("x")) <= 1
    assert "'1' gains no time over a dense layer at this density" in printed
    assert "(as found)" in printed


# Pruning here.


def test_wanda_by_hand():
    weight = torch.tensor([[1.0, -2.0, 3.0], [4.0, 1.0, -1.0]])
    squares = torch.tensor([100.0, 1.0, 4.0])
    scores = score_blocks(weight, squares, 1)
    assert scores.tolist() == [[10, 2, 6], [40, 1, 2]]
    assert select_best_blocks(scores, 4, per_row=True).tolist() == [0, 2, 3, 5]
    assert select_best_blocks(scores, 3, per_row=True).tolist() == [0, 2, 3]  # 6 is more than 2
    assert select_best_blocks(scores, 4, per_row=False).tolist() == [0, 1, 2, 3]
    assert select_best_blocks(scores, 6, per_row=True).tolist() == [0, 1, 2, 3, 4, 5]
    weight = torch.tensor([[1.0, 1.0, 5.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    assert score_blocks(weight, torch.tensor([1.0, 4.0, 1.0, 9.0]), 2).tolist() == [[6, 5]]


def test_sparsegpt_by_hand():
    products = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)  # 2.02 when damped
    pattern, weight = sparsegpt(torch.tensor([[1.0, 3.0]]).double(), products, 1, 1, False)
    # 1 / [H^-1]_00 = 2.02 - 1 / 2.02 for the first, then 9 * 2.02 for the second.
    assert pattern.flat.tolist() == [1]
    torch.testing.assert_close(weight, torch.tensor([[0.0, 3 + 1 / 2.02]]).double())
    pattern, weight = sparsegpt(torch.tensor([[3.0, 1.0]]).double(), products, 1, 1, False)
    assert pattern.flat.tolist() == [0]
    assert weight.tolist() == [[3, 0]]  # nothing stands to the right of the second
    pattern, weight = sparsegpt(torch.tensor([[3.0, 1.0]]), torch.zeros(2, 2), 1, 1, False)
    assert weight.tolist() == [[3, 0]]  # without inputs, by magnitude


@pytest.mark.parametrize(("b", "per_row"), [(1, False), (1, True), (4, False), (16, True)])
def test_sparsegpt_equals_its_definition(b, per_row):
    """The definition inverts the Hessian of the remaining columns for every column."""
    g = torch.Generator().manual_seed(0)
    out, columns, nnz = 32, 192, round(0.4 * 32 * 192 / b**2)
    dense = torch.randn(out, columns, generator=g, dtype=torch.float64)
    x = torch.randn(300, columns, generator=g, dtype=torch.float64) @ torch.randn(
        columns, columns, generator=g, dtype=torch.float64
    )
    products = x.t() @ x
    pattern, weight = sparsegpt(dense, products, nnz, b, per_row)
    assert pattern.nnz == nnz
    mask = pattern.to_mask()
    assert torch.equal(weight != 0, mask)
    h = products + 0.01 * products.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    expected = dense.clone()
    for j in range(columns):
        inverse = h[j:, j:].inverse()
        if j % 128 == 0:  # the best of the next 128 columns, given what was pruned before
            end = min(j + 128, columns)
            diagonal = torch.stack([h[k:, k:].inverse()[0, 0] for k in range(j, end)])
            scores = expected[:, j:end].square() / diagonal
            grid = scores.view(out // b, b, (end - j) // b, b).sum((1, 3))
            part = pattern.to_mask()[::b, ::b][:, j // b : end // b]
            assert torch.equal(part.flatten().nonzero().flatten(),
                               select_best_blocks(grid, int(part.sum()), per_row))  # fmt: skip
        step = expected[:, j] / inverse[0, 0] * ~mask[:, j]
        expected[:, j:] -= step[:, None] * inverse[0]
    torch.testing.assert_close(weight, expected * mask)

    def error(w):
        return (x @ (w - dense).t()).square().sum()

    assert error(weight) < error(dense * mask)


class Block(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.up, self.down = nn.Linear(d, 24), nn.Linear(24, d)

    def forward(self, x, scale):
        return x + self.down(self.up(x).relu()) * scale


class Chain(nn.Module):
    """Blocks, the second of which takes another argument, followed by a head."""

    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(12, 20, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for k, block in enumerate(self.blocks):
            x = block(x, 1.0 + k)
        return self.head(x)


def chain(seed=0):
    torch.manual_seed(seed)
    return Chain().double(), [torch.randint(20, (2, 7)) for _ in range(3)]


@pytest.mark.parametrize("start", ["wanda", "sparsegpt"])
def test_blocks_are_calibrated_with_outputs_of_pruned_blocks(start):
    """Compared with masked dense layers in float64, pruned by hand."""
    model, batches = chain()
    reference = copy.deepcopy(model)
    ds.sparsify(model, 0.25, start=start, calibration=batches, verbose=False)

    def prune(layers, run):
        inputs = {name: [] for name in layers}
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, name=name: inputs[name].append(args[0]))
            for name, layer in layers.items()
        ]
        run()
        for hook in hooks:
            hook.remove()
        for name, layer in layers.items():
            x = torch.cat([x.flatten(0, -2) for x in inputs[name]])
            weight, nnz = layer.weight.data, round(0.25 * layer.weight.numel())
            if start == "sparsegpt":
                weight.copy_(sparsegpt(weight, x.t() @ x, nnz, 1, False)[1])
                continue
            score = weight.abs() * x.norm(dim=0)
            kept = score.argsort(1, descending=True)[:, : weight.shape[1] // 4]
            weight.mul_(torch.zeros_like(weight).scatter_(1, kept, 1.0))

    with torch.no_grad():
        hidden = [reference.embed(ids) for ids in batches]
        for k, block in enumerate(reference.blocks):
            prune({"up": block.up, "down": block.down},
                  lambda b=block, k=k, hidden=hidden: [b(x, 1.0 + k) for x in hidden])  # fmt: skip
            hidden = [block(x, 1.0 + k) for x in hidden]
        prune({"head": reference.head}, lambda: [reference(ids) for ids in batches])
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLinear):
            torch.testing.assert_close(layer.to_dense(), reference.get_submodule(name).weight)
    torch.testing.assert_close(model(batches[0]), reference(batches[0]))


def test_statistics_are_kept_for_one_block_at_a_time():
    model, batches = chain()
    layers = find_candidates(model).items()
    groups = {name: [layer] for name, layer in layers if layer.kind != "embedding"}
    for products, dims in ((False, 1), (True, 2)):
        steps = list(sum_inputs(model, groups, batches, products=products))
        assert [list(sums) for sums in steps] == [
            *([f"blocks.{k}.up", f"blocks.{k}.down"] for k in range(3)),
            ["head"],
        ]
        assert all(total.dim() == dims for sums in steps for total in sums.values())


def test_budgets():
    def counts(**options):
        model, batches = chain()
        if options.get("start") == "wanda":
            options["calibration"] = batches
        ds.sparsify(model, 0.25, verbose=False, **options)
        return {
            name: layer.pattern.to_mask().sum(1)
            for name, layer in model.named_modules()
            if isinstance(layer, SparseLinear)
        }

    for start in ("magnitude", "wanda"):
        rows = counts(start=start, per_row=True, allocation="uniform")
        assert all(len(set(row.tolist())) == 1 for row in rows.values())
        layers = counts(start=start, per_row=False, allocation="uniform")
        assert {n: int(c.sum()) for n, c in layers.items()} == {
            n: int(c.sum()) for n, c in rows.items()
        }
        assert any(len(set(row.tolist())) > 1 for row in layers.values())
        everywhere = counts(start=start, allocation="global")
        assert sum(int(c.sum()) for c in everywhere.values()) == sum(
            int(c.sum()) for c in rows.values()
        )
        assert any(everywhere[n].sum() != rows[n].sum() for n in rows)
    model, _ = chain()
    weights = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    least = torch.cat([w.flatten() for w in weights.values()]).abs().float().sort().values
    threshold = least[-round(0.25 * len(least))]
    kept = counts(start="magnitude", allocation="global")
    assert {n: int((w.abs() >= threshold).sum()) for n, w in weights.items()} == {
        n: int(c.sum()) for n, c in kept.items()
    }


def test_models_without_a_chain_use_dense_inputs():
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x):
            return self.parts[0](x) + self.parts[1](x)

    torch.manual_seed(0)
    model, x = Parallel(), torch.randn(5, 8)
    squares = x.square().sum(0)
    weight = model.parts[1].weight.detach().clone()
    ds.sparsify(model, 0.25, start="wanda", calibration=[x], verbose=False)
    kept = select_best_blocks(score_blocks(weight, squares, 1), 16, per_row=True)
    assert torch.equal(model.parts[1].pattern.flat, kept)


@pytest.mark.parametrize("fails_at", [0, 4, 8, 13])
def test_error_on_a_batch_changes_nothing(fails_at):
    model, batches = chain()
    model.train()
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) > fails_at:
            raise RuntimeError("no more")

    before = list(model.modules())
    hooks = [m.register_forward_pre_hook(fail) for m in (*model.blocks, model.embed)]
    with pytest.raises(RuntimeError, match="no more"):
        ds.sparsify(model, 0.25, start="wanda", calibration=batches, verbose=False)
    for hook in hooks:
        hook.remove()
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
    assert all(module.training for module in model.modules())
    ds.sparsify(model, 0.25, start="wanda", calibration=batches, verbose=False)
    assert all(module.training for module in model.modules())
