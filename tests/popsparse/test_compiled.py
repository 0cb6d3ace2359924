"""Training steps of models on the tile machine equal those of torch."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import dynsparse as ds
import popsparse
from dynsparse.apps import lm
from dynsparse.apps.image_classification import transformer
from dynsparse.apps.lm.model import LanguageModel
from popsparse.compiled.decompositions import TABLE

aten = torch.ops.aten
TARGET = popsparse.Target.bow(tiles=8)


def mlp(seed=0, block_size=1):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    return nn.Sequential(
        ds.nn.SparseLinear(32, 24, 0.3, block_size, generator=generator),
        nn.ReLU(),
        nn.Dropout(0.2),
        ds.nn.SparseLinear(24, 16, 0.5, generator=generator),
        nn.Tanh(),
        nn.Linear(16, 10),
    )


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **more})


def train_on_host(model, optimizer, loss, batches, scheduler=None):
    losses = []
    for *x, y in batches:
        optimizer_of = getattr(optimizer, "optimizer", optimizer)
        optimizer_of.zero_grad()
        value = loss(model(*x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        if scheduler is not None:
            scheduler.step()
    return losses


def digits(steps, batch=6, features=32):
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.rand(batch, features, generator=generator),
            torch.randint(0, 10, (batch,), generator=generator),
        )
        for _ in range(steps)
    ]


def weights(model):
    """Return dense weights and other parameters by name; slots may be in any order."""
    dense = {
        f"{name}.weight": layer.to_dense().detach()
        for name, layer in model.named_modules()
        if isinstance(layer, ds.nn.SparseLinear)
    }
    rest = {n: p.detach() for n, p in model.named_parameters() if not n.endswith("values")}
    return dense | rest


def check(make_model, make_optimizer, loss, batches, *, tolerance=1e-5, target=TARGET, **options):
    """Train the model on the host and on the machine, compare, and return the compiled one."""
    host, twin = make_model(), make_model()
    torch.manual_seed(1)
    expected = train_on_host(host, make_optimizer(host), loss, batches)
    torch.manual_seed(1)
    compiled = popsparse.compile(twin, make_optimizer(twin), loss, target, **options)
    assert [compiled.step(*batch).item() for batch in batches] == pytest.approx(
        expected, abs=tolerance, rel=tolerance
    )
    compiled.copy_weights_to_host()
    for name, weight in weights(host).items():
        torch.testing.assert_close(weights(twin)[name], weight, atol=tolerance, rtol=tolerance)
    return compiled


@pytest.mark.slow
def test_rigl_with_momentum_and_dropout():
    def make_trainer(model):
        return ds.RigL(model, sgd(model, nesterov=True), total_steps=12, update_interval=3)

    compiled = check(mlp, make_trainer, nn.CrossEntropyLoss(), digits(8))
    assert (compiled.trainer.updates, compiled.trainer.steps) == (2, 8)
    profile = compiled.profiles["step"]
    # The batch and its labels come, the loss goes.
    assert (profile.from_host_bytes, profile.to_host_bytes) == (4 * (6 * 32 + 6), 4)
    operations = compiled.operations()
    assert sum(taken["cycles"] for taken in operations.values()) == profile.cycles
    assert {"forward 0 linear", "backward 3 linear", "forward 5 mm", "loss to host"} <= {
        *operations
    }
    assert operations["forward 5 mm"]["received_bytes"] >= 4 * 6 * 16
    assert compiled.profiles["scores 0"].to_host_bytes > 4 * 32 * 24
    assert 0 < profile.memory.max_tile_bytes < TARGET.bytes_per_tile


def test_adam_in_blocks_with_a_schedule_of_rates():
    batches = digits(4)
    host, twin = mlp(block_size=4), mlp(block_size=4)
    results = []
    for model in (host, twin):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        torch.manual_seed(1)
        if model is host:
            results.append(
                train_on_host(model, optimizer, nn.functional.cross_entropy, batches, scheduler)
            )
            continue
        compiled = popsparse.compile(model, optimizer, nn.functional.cross_entropy, TARGET)
        losses = []
        for batch in batches:
            losses.append(compiled.step(*batch).item())
            optimizer.step()  # as schedulers expect it; without gradients it does nothing
            scheduler.step()
        results.append(losses)
        compiled.copy_weights_to_host()
        assert optimizer.state[model[5].weight]["step"] == 4
    assert results[1] == pytest.approx(results[0], abs=1e-5)
    for name, weight in weights(host).items():
        torch.testing.assert_close(weights(twin)[name], weight, atol=1e-5, rtol=1e-5)


def test_variables_of_parameters_have_their_names():
    model = nn.Sequential(nn.Linear(8, 4))
    compiled = popsparse.compile(model, sgd(model), nn.functional.mse_loss, TARGET)
    compiled.step(torch.rand(2, 8), torch.rand(2, 4))
    names = {variable.name for variable in compiled.profiles["step"].contents.variables}
    assert {"parameter 0.weight", "parameter 0.bias", "state 0.weight momentum_buffer"} <= names


def test_iterations_on_the_device_with_a_scaled_loss():
    batches = digits(4)
    host, twin = (nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)) for _ in "ab")
    twin.load_state_dict(host.state_dict())
    expected = train_on_host(host, sgd(host), nn.CrossEntropyLoss(), batches)
    compiled = popsparse.compile(
        twin, sgd(twin), nn.CrossEntropyLoss(), TARGET, device_iterations=2, loss_scale=128.0
    )
    x, y = (torch.stack(parts) for parts in zip(*batches, strict=True))
    losses = torch.cat([compiled.step(x[:2], y[:2]), compiled.step(x[2:], y[2:])])
    assert losses.tolist() == pytest.approx(expected, abs=1e-5)
    assert compiled.profiles["step"].step("loss to host").runs == 2
    with pytest.raises(ValueError, match="expected tensors of 2 batches"):
        compiled.step(x[0], y[0])


@pytest.mark.slow
def test_half_precision_and_random_growth():
    def make_model():
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        sparse = ds.nn.SparseLinear(32, 16, 0.3, 4, generator=generator)
        return nn.Sequential(sparse, nn.ReLU(), nn.Linear(16, 10)).half()

    def loss(logits, labels):
        return nn.functional.cross_entropy(logits.float(), labels)

    batches = [(x.half(), y) for x, y in digits(3)]
    check(make_model, sgd, loss, batches, tolerance=3e-3, loss_scale=64.0)

    model = mlp()
    trainer = ds.SET(model, sgd(model), total_steps=6, update_interval=2)
    compiled = popsparse.compile(model, trainer, nn.CrossEntropyLoss(), TARGET)
    losses = [compiled.step(*digits(1)[0]).item() for _ in range(5)]
    assert (trainer.updates, losses[-1] < losses[0]) == (2, True)
    # Values and momentum go to the host, no scores do.
    weights = sum(tensor.numel for tensor in compiled._layers[0].tensors.values())
    assert compiled.profiles["scores 0"].to_host_bytes == 4 * weights


def test_clipped_gradients_and_the_output():
    def clipped(model, batches):
        optimizer, outputs = sgd(model, lr=0.5), []
        for x, y in batches:
            optimizer.zero_grad()
            outputs.append(model(x))
            nn.functional.cross_entropy(outputs[-1], y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            assert norm > 0.05
            optimizer.step()
        return torch.stack(outputs).detach()

    def make_model():
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        first = ds.nn.SparseLinear(32, 16, 0.3, generator=generator)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(16, 10))

    host, twin, batches = make_model(), make_model(), digits(4)
    expected = clipped(host, batches)
    compiled = popsparse.compile(
        twin, sgd(twin, lr=0.5), nn.CrossEntropyLoss(), TARGET, clip_grad_norm=0.05,
        return_output=True, device_iterations=2,
    )  # fmt: skip
    x, y = (torch.stack(parts) for parts in zip(*batches, strict=True))
    losses, outputs = zip(*(compiled.step(x[i : i + 2], y[i : i + 2]) for i in (0, 2)), strict=True)
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-5, rtol=1e-5)
    flat = expected.flatten(0, 1), y.flatten()
    means = nn.functional.cross_entropy(*flat, reduction="none").view(4, -1).mean(1)
    torch.testing.assert_close(torch.cat(losses), means)
    compiled.copy_weights_to_host()
    for name, weight in weights(host).items():
        torch.testing.assert_close(weights(twin)[name], weight, atol=1e-5, rtol=1e-5)
    step = compiled.figures()["step"]
    assert step["to_host_bytes"] == 2 * 4 * (1 + 6 * 10)
    flops = sum(taken["flops"] for taken in compiled.operations().values())
    assert step["tflops"] == pytest.approx(flops / step["seconds"] / 1e12)
    with pytest.raises(ValueError, match="clip_grad_norm must be"):
        popsparse.compile(host, sgd(host), torch.dot, TARGET, clip_grad_norm=0.0)


def half_linear(lr, **options):
    """Return the weights of a float16 layer after 20 steps with gradient 1, and cycles per step."""
    model = nn.Linear(8, 64, bias=False).half()
    nn.init.ones_(model.weight)
    compiled = popsparse.compile(
        model, sgd(model, lr=lr, momentum=0.0), lambda y, sign: (y.float() * sign).sum(), TARGET,
        **options,
    )  # fmt: skip
    for _ in range(20):
        compiled.step(torch.ones(1, 8).half(), torch.ones(1, 64))
    compiled.copy_weights_to_host()
    return model.weight.detach().float(), compiled.profiles["step"].cycles


def test_small_float16_steps_require_stochastic_rounding():
    # A tenth of half the distance of float16 numbers below 1.
    lr = 2.0**-12 / 10
    nearest, cycles = half_linear(lr)
    assert torch.equal(nearest, torch.ones(64, 8))
    weights, more = half_linear(lr, stochastic_rounding=7)
    assert more == cycles
    # 512 weights, each of which moved by 20 trials of probability 1/20 and steps of 2^-11.
    moved = (1 - weights) / 2.0**-11
    assert torch.equal(moved, moved.round())
    assert moved.mean().item() == pytest.approx(1, abs=4 * (0.95 / 512) ** 0.5)
    assert moved.var().item() == pytest.approx(0.95, rel=0.3)
    again, _ = half_linear(lr, stochastic_rounding=7)
    assert torch.equal(again, weights)
    other, _ = half_linear(lr, stochastic_rounding=8)
    assert not torch.equal(other, weights)
    with pytest.raises(TypeError, match="stochastic_rounding must be"):
        half_linear(lr, stochastic_rounding="yes")


@pytest.mark.parametrize("partials", ["float16", "float32"])
def test_partial_sums_of_dense_products(partials):
    """Partial sums of float16 layers have the type given in the options."""
    model = nn.Linear(4096, 1, bias=False).half()
    nn.init.constant_(model.weight, 0.25)
    compiled = popsparse.compile(
        model, sgd(model), lambda y, target: (y.float() - target).sum(), TARGET,
        options={"partials_type": partials},
    )  # fmt: skip
    loss = compiled.step(torch.ones(1, 4096).half(), torch.tensor([[1024.0]]))
    assert loss.item() == 0
    groups = compiled.engine.graph.variables.values()
    held = {v.dtype.name for group in groups for v in group if "partials" in v.name}
    assert ("float16" in held) == (partials == "float16")


def test_bad_input():
    model = nn.Sequential(nn.Linear(8, 4))
    compiled = popsparse.compile(model, sgd(model), nn.functional.mse_loss, TARGET)
    with pytest.raises(RuntimeError, match="take a step first"):
        compiled.copy_weights_to_host()
    x, y = torch.rand(3, 8), torch.rand(3, 4)
    compiled.step(x, y)
    with pytest.raises(ValueError, match=r"for batches of \[\(3, 8\), \(3, 4\)\], got \[\(2, 8\)"):
        compiled.step(x[:2], y[:2])
    compiled.optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match="other than lr are constants"):
        compiled.step(x, y)
    with pytest.raises(TypeError, match="target must be"):
        popsparse.compile(model, sgd(model), nn.functional.mse_loss, "bow")
    with pytest.raises(TypeError, match=r"SGD, Adam or AdamW, .* got RMSprop"):
        popsparse.compile(model, torch.optim.RMSprop(model.parameters()), torch.dot, TARGET)
    double = copy.deepcopy(model).double()
    compiled = popsparse.compile(double, sgd(double), nn.functional.mse_loss, TARGET)
    with pytest.raises(TypeError, match=r"float16 and float32, got torch\.float64"):
        compiled.step(x.double(), y.double())
    model = mlp()
    for kind in (ds.DeepR, ds.MEST):
        trainer = kind(model, sgd(model), total_steps=6, update_interval=2)
        compiled = popsparse.compile(model, trainer, nn.functional.cross_entropy, TARGET)
        with pytest.raises(ValueError, match=f"{kind.__name__} looks at gradients or weights on"):
            compiled.step(*digits(1)[0])
    model = nn.Sequential(nn.Linear(8, 4))
    unsupported = {
        "sort": lambda x: x.sort().values,
        # Random numbers, which must neither be zeros nor constants of the program.
        "rand_like": lambda x: x + torch.rand_like(x),
        "rand": lambda x: x + torch.rand(4),
        "bernoulli": lambda x: x * torch.bernoulli(torch.full((4,), 0.25)),
        "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    }
    for name, function in unsupported.items():
        other = copy.deepcopy(model).append(_Apply(function))
        compiled = popsparse.compile(other, sgd(other), nn.functional.mse_loss, TARGET)
        message = rf"aten\.{name}\.default of 'forward 1 {name}' has no program"
        with pytest.raises(NotImplementedError, match=message):
            compiled.step(x, y)


class _Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_constants_beyond_int32_raise():
    model, large = nn.Linear(8, 4), torch.tensor([2**40] * 6)

    def loss(y, labels):
        return nn.functional.cross_entropy(y, torch.where(labels == large, labels, labels))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = popsparse.compile(model, optimizer, loss, TARGET)
    with pytest.raises(ValueError, match="does not fit the machine: values: int32"):
        compiled.step(torch.rand(6, 8), torch.randint(4, (6,)))


def test_convolutions_and_pooling():
    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, stride=2, padding=1),
            nn.AvgPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(24, 10),
        )

    batches = [(x.view(3, 1, 12, 12), y) for x, y in digits(2, 3, 144)]
    check(make_model, sgd, nn.CrossEntropyLoss(), batches)


CONVOLUTIONS = [
    # size, kernel, stride, padding, dilation
    ((7, 6), (3, 3), [1, 1], [0, 0], [1, 1]),
    ((8, 7), (3, 3), [2, 2], [1, 1], [1, 1]),
    ((9, 8), (3, 2), [2, 1], [1, 0], [1, 2]),
    ((6, 6), (5, 5), [1, 1], [2, 2], [1, 1]),
    ((5, 5), (1, 1), [2, 2], [0, 0], [1, 1]),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation"), CONVOLUTIONS)
def test_convolutions_equal_torch(size, kernel, stride, padding, dilation):
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, *size).double(), torch.randn(4, 3, *kernel).double()
    how = (stride, padding, dilation, False, [0, 0], 1)
    y = aten.convolution(x, w, torch.ones(4).double(), *how)
    torch.testing.assert_close(
        TABLE[aten.convolution.default](x, w, torch.ones(4).double(), *how), y
    )
    arguments = (torch.randn_like(y), x, w, [4], *how, [True] * 3)
    torch.testing.assert_close(
        TABLE[aten.convolution_backward.default](*arguments), aten.convolution_backward(*arguments)
    )


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [((8, 6), 2, 2, 0), ((7, 5), 2, 2, 0), ((8, 7), 3, 2, 1), ((6, 6), 3, 1, 1)],
)
def test_pooling_equals_torch(size, kernel, stride, padding):
    x = torch.randint(0, 4, (2, 3, *size)).double()  # equal numbers: the first is the highest
    how = ([kernel] * 2, [stride] * 2, [padding] * 2)
    y, indices = aten.max_pool2d_with_indices(x, *how)
    torch.testing.assert_close(TABLE[aten.max_pool2d_with_indices.default](x, *how), (y, indices))
    dy = torch.randn_like(y)
    highest = (dy, x, *how, [1, 1], False, indices)
    mean = (dy, x, *how, False, True, None)
    for operator, arguments in (
        (aten.max_pool2d_with_indices_backward, highest),
        (aten.avg_pool2d, (x, *how)),
        (aten.avg_pool2d_backward, mean),
    ):
        torch.testing.assert_close(TABLE[operator.default](*arguments), operator(*arguments))


@pytest.mark.slow
def test_batch_norm_and_its_buffers():
    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 10))

    compiled = check(make_model, sgd, nn.CrossEntropyLoss(), digits(3))
    host = make_model()
    train_on_host(host, sgd(host), nn.CrossEntropyLoss(), digits(3))
    for buffer, other in zip(compiled.model.buffers(), host.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)


@pytest.mark.slow
def test_groups_of_parameters_and_decoupled_decay():
    def of_groups(model):
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}]
        return torch.optim.SGD(groups, lr=0.01, weight_decay=0.01, momentum=0.9)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)

    for make_optimizer in (of_groups, adamw):
        check(mlp, make_optimizer, nn.CrossEntropyLoss(), digits(4))


@pytest.mark.slow
def test_transformer_layer_with_dropout():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 16)
            self.layer = nn.TransformerEncoderLayer(
                16, 4, 32, 0.1, activation="gelu", batch_first=True, norm_first=True
            )
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

        def forward(self, tokens):
            return self.head(self.norm(self.layer(self.table(tokens))).mean(1))

    def make_model():
        torch.manual_seed(0)
        return Encoder()

    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randint(0, 20, (3, 7), generator=generator), y) for _, y in digits(6, batch=3)
    ]
    check(make_model, sgd, nn.CrossEntropyLoss(), batches)


@pytest.mark.slow
def test_row_transformer_with_rigl():
    def make_model():
        torch.manual_seed(0)
        sizes = {"hidden_length": 16, "ff_length": 12, "attention_heads": 2, "qkv_length": 4}
        return transformer.Network(
            transformer.Options(**sizes, sparsity=0.5), torch.Generator().manual_seed(0)
        )

    def make_trainer(model):
        return ds.RigL(model, sgd(model, lr=0.002), total_steps=12, update_interval=3)

    compiled = check(make_model, make_trainer, nn.CrossEntropyLoss(), digits(6, 2, 784))
    assert compiled.trainer.updates == 2


@pytest.mark.slow
def test_language_model_with_rigl():
    def make_model():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "sequence_length": 8, "layers": 1, "heads": 2}
        options = lm.Options(**sizes, sparsity=0.5, droprate=0.0)
        return LanguageModel(options, 30, torch.Generator().manual_seed(0))

    def loss(logits, tokens):
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def make_trainer(model):
        return ds.RigL(model, sgd(model, lr=0.01), total_steps=12, update_interval=3)

    tokens = torch.randint(0, 30, (4, 2, 9), generator=torch.Generator().manual_seed(1))
    batches = [(part[:, :-1], part[:, 1:].contiguous()) for part in tokens]
    check(make_model, make_trainer, loss, batches)


PAGE = Path(__file__).parents[2] / "docs" / "popsparse-machine.md"


def _networks():
    """Return {first cell of a row of the page's table: (network, inputs)}."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    yield "two dense", nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), [32, 784]
    channels = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU()
    rest = nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(1600, 10)
    yield "convolutions of", nn.Sequential(*channels, *rest), [64, 1, 28, 28]
    first = ds.nn.SparseLinear(784, 320, 0.05, generator=generator)
    sparse = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.1), nn.Linear(320, 10))
    yield "784 x 320", sparse, [16, 784]
    generator = torch.Generator().manual_seed(0)
    yield "`dynsparse", transformer.Network(transformer.Options(), generator), [2, 784]


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
@pytest.mark.parametrize("number", range(4))
def test_losses_and_cycles_of_the_page(number):
    begin, model, shape = list(_networks())[number]
    row = re.search(rf"^\| {begin}.*$", PAGE.read_text(), re.M)[0]
    cells = [cell.strip() for cell in row.split("|")[2:-2]]
    _, target, *cycles = [cell.replace(",", "") for cell in cells]
    momentum = 0.9 if target == "bow" else 0.0
    optimizer = sgd(model, momentum=momentum)
    machine = popsparse.Target.named(target)
    compiled = popsparse.compile(model, optimizer, nn.CrossEntropyLoss(), machine)
    x, labels = torch.rand(shape), torch.randint(0, 10, shape[:1])
    torch.manual_seed(1)
    expected = nn.functional.cross_entropy(model(x), labels).item()
    torch.manual_seed(1)
    assert compiled.step(x, labels).item() == pytest.approx(expected, rel=1e-5)
    profile = compiled.profiles["step"]
    parts = [profile.parts[part] for part in ("compute", "exchange", "sync", "host")]
    assert [float(n) for n in cycles[:5]] == [profile.cycles, *parts]
    assert round(profile.seconds * 1e6) == float(cycles[5])


@pytest.mark.slow
def test_patterns_and_weights_stay_equal_for_100_steps():
    """The network of Graphcore's application with a quarter of its inputs and hidden features."""

    def make_model():
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        return nn.Sequential(
            ds.nn.SparseLinear(196, 80, 0.1, generator=generator),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(80, 10),
        )

    def make_trainer(model):
        return ds.RigL(model, sgd(model, lr=0.02), total_steps=120, update_interval=25)

    compiled = check(make_model, make_trainer, nn.CrossEntropyLoss(), digits(100, 16, 196))
    assert compiled.trainer.updates == 3
