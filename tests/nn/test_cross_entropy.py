"""linear_cross_entropy equals torch's loss and gradients, with the logits in chunks."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import dynsparse as ds
from dynsparse.nn import (
    SparseEmbedding,
    SparseLinear,
    TiedHead,
    cross_entropy,
    linear_cross_entropy,
)

FEATURES, CLASSES = 8, 20


def make_head(kind, dtype=torch.float64):
    torch.manual_seed(0)
    if kind == "dense":
        return nn.Linear(FEATURES, CLASSES, dtype=dtype)
    if kind == "sparse":
        return SparseLinear(FEATURES, CLASSES, 0.4, 4, dtype=dtype)
    table = SparseEmbedding(CLASSES, FEATURES, 0.4, dtype=dtype)
    if kind == "table":
        return table
    return TiedHead(table, nn.Parameter(torch.randn(CLASSES, dtype=dtype)))


def parameters_of(head):
    table = [head.table.values] if isinstance(head, TiedHead) else []
    return [*head.parameters(), *table]


def make_batch(dtype=torch.float64):
    torch.manual_seed(1)
    hidden = torch.randn(3, 5, FEATURES, dtype=dtype, requires_grad=True)
    targets = torch.randint(CLASSES, (3, 5))
    targets[0, 2] = targets[2, 4] = -100
    return hidden, targets


def reference(hidden, head, targets, **options):
    logits = (head.logits if isinstance(head, SparseEmbedding) else head)(hidden)
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)
    return losses.view(targets.shape) if losses.dim() else losses


@pytest.mark.parametrize("options", [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "ignore_index": 3},
    {"ignore_index": 3, "label_smoothing": 1.0},
])  # fmt: skip
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
@pytest.mark.parametrize("kind", ["dense", "sparse", "table", "tied"])
def test_equals_torch(kind, chunk_size, options):
    head, (hidden, targets) = make_head(kind), make_batch()
    if "ignore_index" in options:
        targets[targets == -100] = 3
    weights = torch.rand(3, 5, dtype=torch.float64)
    inputs = [hidden, *parameters_of(head)]
    results = []
    for function, more in ((linear_cross_entropy, {"chunk_size": chunk_size}), (reference, {})):
        loss = function(hidden, head, targets, **options, **more)
        total = (loss * weights).sum() if loss.dim() else 3 * loss
        results.append((loss, torch.autograd.grad(total, inputs)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_autocast(kind):
    head, (hidden, targets) = make_head(kind, torch.float32), make_batch(torch.float32)
    inputs = [hidden, *parameters_of(head)]
    results = []
    for function, more in ((linear_cross_entropy, {"chunk_size": 4}), (reference, {})):
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(hidden, head, targets, **more)
        results.append((loss, torch.autograd.grad(loss, inputs)))
    assert results[0][0].dtype == torch.float32
    torch.testing.assert_close(*results, rtol=0.02, atol=2e-3)


def test_second_backward_raises():
    head, (hidden, targets) = make_head("tied"), make_batch()
    loss = linear_cross_entropy(hidden, head, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_many_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", 4 * CLASSES)
    test_equals_torch("tied", None, {"label_smoothing": 0.1})
    test_autocast("tied")


def test_mean_without_targets_is_nan_as_in_torch():
    head, (hidden, targets) = make_head("dense"), make_batch()
    targets = torch.full_like(targets, -100)
    assert linear_cross_entropy(hidden, head, targets).isnan()
    assert linear_cross_entropy(hidden, head, targets, reduction="sum") == 0


def test_memory_holds_logits_of_one_chunk():
    head, (hidden, targets) = make_head("tied"), make_batch()

    def count(chunk_size):
        """Return the number of elements of the largest tensor saved for backward."""
        sizes = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
        )
        with hooks:
            linear_cross_entropy(hidden, head, targets, chunk_size=chunk_size)
        return max(sizes)

    assert count(None) == 15 * CLASSES
    assert count(1) < 15 * FEATURES + CLASSES


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_growth_sees_the_full_gradient(chunk_size):
    """The gradient of the look-ups and of the logits of every chunk."""
    torch.manual_seed(3)
    table = SparseEmbedding(CLASSES, FEATURES, 0.25, dtype=torch.float64)
    model = nn.ModuleDict({"embed": table, "head": TiedHead(table)})
    ids, targets = torch.randint(CLASSES, (2, 15))
    weight = table.to_dense().detach().requires_grad_()
    functional.cross_entropy(functional.embedding(ids, weight) @ weight.t(), targets).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    trainer = ds.RigL(model, optimizer, total_steps=100, update_interval=1, drop_fraction=0.3)
    before = table.pattern
    linear_cross_entropy(
        model["embed"](ids), model["head"], targets, chunk_size=chunk_size
    ).backward()
    torch.testing.assert_close(table.values.grad, before.values_of(weight.grad))
    rewiring = trainer.step()["embed"]
    grown = rewiring.after.flat[rewiring.grown]
    score = weight.grad.abs().flatten()
    score[before.flat] = -1
    assert len(grown) > 0
    assert torch.equal(grown, score.topk(len(grown)).indices.sort().values)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"targets": torch.zeros(3, 5)}, TypeError, "targets must be int64, got torch.float32"),
        (
            {"targets": torch.zeros(15, dtype=torch.int64)},
            ValueError,
            r"targets must be \[3, 5\], one for each sample of hidden, got \[15\]",
        ),
        ({"head": nn.ReLU()}, TypeError, "head must have out_features"),
        ({"reduction": "max"}, ValueError, "reduction must be one of"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be a number in"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be"),
        ({"targets": torch.full((3, 5), CLASSES)}, RuntimeError, "out of bounds"),
    ],
)
def test_bad_input(arguments, error, message):
    hidden, targets = make_batch()
    arguments = {"hidden": hidden, "head": make_head("dense"), "targets": targets} | arguments
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments)
