"""Training with sparse convolutions, compared step by step with two reference models.

One replaces each convolution by a sparse linear layer over the unfolded input; the other is a
masked dense `nn.Conv2d` that does not use the library.
"""

import copy
import math

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseConv1d, SparseConv2d, SparseLinear
from dynsparse.ops.conv.geometry import to_matrix
from dynsparse.ops.conv.patches import patches_of
from dynsparse.training.algorithms import BY_NAME
from dynsparse.training.history import gradient_at

STEPS, INTERVAL = 200, 30


class Unfolded(SparseLinear):
    """A `SparseConv2d` as a linear layer over the unfolded input."""

    @classmethod
    def of(cls, conv):
        made = cls(conv.in_features, conv.out_channels, pattern=conv.pattern, dtype=torch.float64)
        made.load_state_dict(conv.state_dict())
        made.resizable, made.options = conv.resizable, (conv,)  # no module of this one
        return made

    def forward(self, x):
        (conv,) = self.options
        seen = nn.functional.unfold(
            x, conv.kernel_size, conv.dilation, conv.padding, conv.stride
        )  # [batch, in * taps, positions]
        batch, _, positions = seen.shape
        taps = conv.kernel_size[0] * conv.kernel_size[1]
        seen = seen.view(batch, -1, taps, positions).permute(0, 3, 2, 1)
        y = super().forward(seen.reshape(batch * positions, -1))
        size = conv.geometry.output_size(*x.shape[2:])
        return y.view(batch, positions, -1).transpose(1, 2).unflatten(2, size)


def network(b, density):
    torch.manual_seed(0)  # of the last layer
    g = torch.Generator().manual_seed(0)
    options = {"density": density, "block_size": b, "generator": g, "dtype": torch.float64}
    return nn.Sequential(
        SparseConv2d(4, 8, 3, padding=1, **options), nn.ReLU(),
        SparseConv2d(8, 12, (2, 3), 2, dilation=(1, 2), **options), nn.ReLU(),
        nn.Flatten(), nn.Linear(12 * 4 * 2, 5, dtype=torch.float64),
    )  # fmt: skip


def batches():
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(6, 4, 8, 8, generator=data, dtype=torch.float64)
        yield x, torch.randint(5, (6,), generator=data)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("name", ["rigl", "snfs", "granet", "topkast"])
def test_training_equals_unfolded_linear_layers(name, b):
    algorithm = BY_NAME[name]
    model = network(b, algorithm.first_density(0.25))
    other = nn.Sequential(*[
        Unfolded.of(m) if isinstance(m, SparseConv2d) else copy.deepcopy(m) for m in model
    ])  # fmt: skip
    options = {"total_steps": STEPS, "update_interval": INTERVAL}
    if name == "granet":
        options["final_density"] = 0.25
    if name == "topkast":
        options["seed"] = 3
    runs = []
    for net in (model, other):
        optimizer = sgd(net)
        runs.append((net, optimizer, algorithm.trainer(net, optimizer, **options)))
    for step, (x, target) in enumerate(batches(), 1):
        for net, optimizer, trainer in runs:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), target).backward()
            trainer.step()
        for mine, theirs in zip(model, other, strict=True):
            if isinstance(mine, SparseConv2d):
                assert mine.pattern == theirs.pattern, f"step {step}"
                worst = float((mine.values - theirs.values).detach().abs().max())
                assert worst < 1e-10, f"step {step}: {worst}"
    # The last update may be too small for a whole block.
    assert runs[0][2].updates == runs[1][2].updates >= 3


@pytest.mark.parametrize("b", [1, 2])
def test_rigl_equals_masked_dense_convolutions(b):
    model = network(b, 0.25)
    dense = ds.densify(copy.deepcopy(model))
    places = [i for i, m in enumerate(model) if isinstance(m, SparseConv2d)]
    masks = {i: model[i].pattern.to_mask() for i in places}
    optimizer, other = sgd(model), sgd(dense)
    trainer = ds.RigL(model, optimizer, total_steps=STEPS, update_interval=INTERVAL,
                      drop_fraction=0.3)  # fmt: skip
    made = 0
    for step, (x, target) in enumerate(batches(), 1):
        for net, opt in ((model, optimizer), (dense, other)):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), target).backward()
        made += trainer.step() is not None
        whole = {i: to_matrix(dense[i].weight.grad).clone() for i in places}
        for i in places:
            dense[i].weight.grad.mul_(as_weight(masks[i], dense[i]))
        other.step()
        if step % INTERVAL == 0 and step < 0.75 * STEPS:
            share = 0.3 / 2 * (1 + math.cos(math.pi * step / (0.75 * STEPS)))
            for i in places:
                masks[i] = rewired(dense[i], masks[i], whole[i], share, other, b)
        for i in places:
            assert torch.equal(model[i].pattern.to_mask(), masks[i]), f"step {step}"
            worst = float((model[i].to_dense() - dense[i].weight).detach().abs().max())
            assert worst < 1e-10, f"step {step}: {worst}"
    assert made == 4


def as_weight(matrix, conv):
    kh, kw = conv.kernel_size
    return matrix.view(conv.out_channels, kh * kw, -1).transpose(1, 2).reshape(conv.weight.shape)


@torch.no_grad()
def rewired(conv, mask, gradient, share, optimizer, b):
    """The mask after an update; weights and momentum outside it become zero."""
    height, width = mask.shape[0] // b, mask.shape[1] // b

    def pooled(matrix):
        return matrix.abs().view(height, b, width, b).sum((1, 3)).flatten()

    present = pooled(mask.double()) > 0
    count = math.floor(share * int(present.sum()))
    drop = pooled(to_matrix(conv.weight)).masked_fill(~present, math.inf).argsort(stable=True)
    grow = pooled(gradient).masked_fill(present, -1).argsort(descending=True, stable=True)
    kept = present.clone()
    kept[drop[:count]] = False
    after = kept.clone()
    after[grow[:count]] = True

    def spread(blocks):
        return blocks.view(height, width).repeat_interleave(b, 0).repeat_interleave(b, 1)

    survivors = as_weight(spread(kept), conv)
    conv.weight.mul_(survivors)
    optimizer.state[conv.weight]["momentum_buffer"].mul_(survivors)
    return spread(after)


def test_resume_is_exact(tmp_path):
    """Checkpoints contain the captured pairs, which are views for convolutions."""

    def begin():
        model = network(1, 0.25)
        optimizer = sgd(model)
        return model, optimizer, ds.SNFS(model, optimizer, total_steps=STEPS, update_interval=20)

    def named(run):
        return dict(zip(("model", "optimizer", "trainer"), run, strict=True))

    def train(model, optimizer, trainer, data):
        for x, target in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), target).backward()
            trainer.step()

    data = list(batches())
    whole = begin()
    train(*whole, data[:41])
    first = begin()
    train(*first, data[:17])
    ds.training.save_checkpoint(tmp_path / "run.pt", **named(first))
    second = begin()
    ds.training.load_checkpoint(tmp_path / "run.pt", **named(second))
    train(*second, data[17:41])
    for mine, theirs in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert whole[0][0].pattern == second[0][0].pattern


def test_growth_of_grouped_and_1d_convolutions():
    for layer, size in (
        (SparseConv2d(6, 12, (3, 2), 2, 1, groups=3, density=0.2, block_size=2), (7, 6)),
        (SparseConv1d(6, 4, 3, padding="same", groups=2, density=0.2), (9,)),
        (SparseConv2d(4, 4, 3, 1, 1, padding_mode="circular", density=0.3), (5, 5)),
    ):
        layer = layer.double()
        dense = nn.Sequential(copy.deepcopy(layer))
        dense = ds.densify(dense)[0]
        trainer = ds.RigL(layer, sgd(layer), total_steps=10, update_interval=1, drop_fraction=0.3)
        x = torch.randn(3, layer.in_channels, *size, dtype=torch.float64)
        before = layer.pattern
        layer(x).square().sum().backward()
        dense(x).square().sum().backward()
        trainer.step()
        b = layer.block_size
        height, width = before.grid
        score = to_matrix(dense.weight.grad).abs().view(height, b, width, b).sum((1, 3)).flatten()
        score[before.flat] = -1
        grown = layer.pattern.flat[~before.contains(layer.pattern.flat)]
        assert len(grown)
        best = score.argsort(descending=True)[: len(grown)].sort().values
        assert torch.equal(grown, best)


def test_snfs_follows_slots_of_grouped_convolutions():
    g = torch.Generator().manual_seed(0)
    layer = SparseConv2d(4, 8, 3, groups=2, density=0.3, generator=g, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    trainer = ds.training.SNFS(layer, optimizer, total_steps=20, update_interval=2)
    for _ in range(10):
        optimizer.zero_grad()
        x = torch.randn(3, 4, 6, 6, generator=g, dtype=torch.float64, requires_grad=True)
        layer(x).square().sum().backward()
        trainer.step()
    assert trainer.updates > 3
    pattern = layer.pattern
    assert pattern.flat.tolist() != sorted(pattern.flat.tolist())  # slots in an order of their own
    x, dy = (torch.randn(2, c, 6, 6, generator=g, dtype=torch.float64) for c in (4, 8))
    pair = patches_of(x, dy[:, :, :4, :4], layer.geometry)
    dense = nn.grad.conv2d_weight(x, (8, 2, 3, 3), dy[:, :, :4, :4], groups=2)
    expected = to_matrix(dense)[pattern.rows.long(), pattern.cols.long()]
    assert torch.allclose(gradient_at([pair], pattern), expected)
