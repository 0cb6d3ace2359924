"""Several steps per call equal a plain loop bit for bit, for any split of the batch."""

import os
import shutil
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import dynsparse as ds
from popsparse import poptorch
from popsparse.machine import Target
from popsparse.poptorch import OutputMode, ReductionType


class Network(nn.Module):
    """The perceptron of PopTorch's introduction; forward returns outputs and loss."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(20, 32), nn.Linear(32, 4)
        self.dropout = nn.Dropout(dropout)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        out = self.second(self.dropout(torch.relu(self.first(x))))
        if labels is None:
            return out
        return out, self.loss(out, labels)


def network(dropout=0.0, density=0.3):
    torch.manual_seed(0)
    return ds.sparsify(Network(dropout), density=density, exclude=["second"], verbose=False)


def data(samples, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 20, generator=g), torch.randint(4, (samples,), generator=g)


def trained(model):
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return ds.RigL(model, optimizer, total_steps=40, update_interval=3)


def options(iterations, accumulated=1, replicas=1):
    made = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulated)
    return made


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compile", [False, "aot_eager"])
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("reduction", ReductionType)
def test_equals_a_plain_loop(accumulated, replicas, reduction, compile):
    """The loop is compiled as well, as compiled programs may round differently from eager ones."""
    size, iterations, calls = 4, 5, 3
    x, labels = data(calls * iterations * accumulated * replicas * size)
    plain = network(dropout=0.2)
    called = torch.compile(plain, backend=compile) if compile else plain
    trainer = trained(plain)
    torch.manual_seed(7)
    losses, at = [], 0
    batches = accumulated * replicas
    for _ in range(calls * iterations):
        trainer.optimizer.zero_grad()
        for _ in range(batches):
            part = slice(at, at + size)
            _, loss = called(x[part], labels[part])
            mean = reduction is ReductionType.Mean and batches > 1
            (loss / batches if mean else loss).backward()
            losses.append(loss.detach())
            at += size
        trainer.step()

    model = network(dropout=0.2)
    wrapped_trainer = trained(model)
    torch.manual_seed(7)
    opts = options(iterations, accumulated, replicas).outputMode(OutputMode.All)
    opts.Training.accumulationAndReplicationReductionType(reduction)
    training = poptorch.trainingModel(model, opts, optimizer=wrapped_trainer, compile=compile)
    combined = size * iterations * batches
    seen = []
    for i in range(calls):
        part = slice(i * combined, (i + 1) * combined)
        out, loss = training(x[part], labels[part])
        assert out.shape == (combined, 4)
        seen.append(loss)
    assert wrapped_trainer.updates == trainer.updates > 0
    assert torch.equal(torch.cat(seen), torch.stack(losses))
    assert model.first.pattern == plain.first.pattern
    assert same(model, plain)
    assert not out.requires_grad


@pytest.mark.slow
def test_inductor_equals_a_compiled_loop(tmp_path, monkeypatch):
    if shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    x, labels = data(3 * 8)
    plain, model = network(), network()
    by_hand, trainer = trained(plain), trained(model)
    torch.compiler.reset()  # so that it compiles anew
    torch._inductor.utils.clear_caches()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    opts = options(3).enableExecutableCaching(tmp_path / "cache")
    poptorch.trainingModel(model, opts, optimizer=trainer)(x, labels)
    assert any((tmp_path / "cache").iterdir())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "other")
    compiled = torch.compile(plain)
    for i in range(3):
        by_hand.optimizer.zero_grad()
        compiled(x[8 * i : 8 * i + 8], labels[8 * i : 8 * i + 8])[1].backward()
        by_hand.step()
    assert same(model, plain)


def test_cache_folder_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    model, folders = network(), []
    model.register_forward_hook(lambda *_: folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    poptorch.inferenceModel(model, compile=False)(data(4)[0])
    assert folders == [str(tmp_path)]


def test_outputs_by_mode():
    model, (x, labels) = network(), data(2 * 6 * 2 * 3)
    parts = [(x[i : i + 3], labels[i : i + 3]) for i in range(0, len(x), 3)]
    model.eval()
    with torch.no_grad():
        single = [model(*part) for part in parts]  # iterations, replicas
    expected = {
        OutputMode.All: range(24),
        OutputMode.Final: (22, 23),
        OutputMode.EveryN: [i for i in range(24) if i // 2 % 4 == 3],
    }
    for mode, kept in expected.items():
        opts = options(12, replicas=2).outputMode(mode, 4 if mode is OutputMode.EveryN else None)
        out, loss = poptorch.inferenceModel(model, opts, compile=False)(x, labels)
        assert torch.equal(out, torch.cat([single[i][0] for i in kept]))
        assert torch.equal(loss, torch.stack([single[i][1] for i in kept]))
    opts = options(12, replicas=2).anchorMode(OutputMode.Sum)
    out, loss = poptorch.inferenceModel(model, opts, compile=False)(x, labels)
    torch.testing.assert_close(out, sum(one[0] for one in single))
    torch.testing.assert_close(loss, sum(one[1] for one in single))


def test_training_returns_the_last_batch_by_default():
    model, (x, labels) = network(), data(12)
    out, loss = poptorch.trainingModel(model, options(3), compile=False)(x, labels)
    assert out.shape == (4, 4)
    assert loss.shape == ()
    assert not model.first.training or model.training  # as it was before
    inference = poptorch.inferenceModel(model.eval(), options(3), compile=False)
    assert inference(x).shape == (12, 4)
    assert not model.training


def test_on_the_tile_machine():
    x, labels = data(12)
    plain, model = network(), network()
    a, b = trained(plain), trained(model)
    poptorch.trainingModel(plain, options(3), optimizer=a, compile=False)(x, labels)
    target = Target(tiles=4)
    training = poptorch.trainingModel(model, options(3), optimizer=b, target=target)
    training(x, labels)
    assert model.first.executor is None
    torch.testing.assert_close(model.first.to_dense(), plain.first.to_dense(), rtol=1e-4, atol=1e-5)
    assert "Adam" in repr(b.optimizer)
    with pytest.raises(ValueError, match="of which the model has none"):
        poptorch.trainingModel(nn.Linear(3, 3), target=target)


class TestDataLoader:
    def test_combined_batch_size(self):
        set_of = TensorDataset(*data(100))
        loader = poptorch.DataLoader(options(2, 3, 2), set_of, batch_size=2)
        assert loader.combinedBatchSize == 24
        batches = list(loader)
        assert len(batches) == len(loader) == 4
        x, _ = data(100)
        assert torch.equal(torch.cat([batch[0] for batch in batches]), x[:96])

    @pytest.mark.parametrize("mode", poptorch.DataLoaderMode)
    def test_prefetching_does_not_change_batches(self, mode):
        opts = options(2).randomSeed(3)
        order = []
        for noise in (False, True):
            loader = poptorch.DataLoader(
                opts, TensorDataset(*data(40)), batch_size=2, shuffle=True, mode=mode
            )
            rows = []
            for batch in loader:
                rows.append(batch[0])
                if noise:
                    torch.rand(10)
            order.append(torch.cat(rows))
        assert torch.equal(*order)

    def test_prefetching_in_the_background(self):
        asked, ahead = [], threading.Event()

        class Slow(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                asked.append((index, threading.current_thread().name))
                if index == 3:
                    ahead.set()
                return torch.zeros(1)

        iterator = iter(poptorch.DataLoader(options(1), Slow(), batch_size=1))
        next(iterator)
        assert ahead.wait(20)  # though nobody asked for it
        assert {name for _, name in asked} == {"poptorch.DataLoader_0"}
        iterator.close()
        assert not any(t.name.startswith("poptorch") for t in threading.enumerate())

    def test_data_set_error_is_raised(self):
        class Broken(IterableDataset):
            def __iter__(self):
                yield torch.zeros(1)
                raise OSError("the disk")

        with pytest.raises(OSError, match="the disk"):
            list(poptorch.DataLoader(options(1), Broken()))

    def test_synthetic_data_are_read_once(self):
        asked = []

        class Counting(Dataset):
            def __len__(self):
                return 12

            def __getitem__(self, index):
                asked.append(index)
                return torch.full((20,), float(index)), 1

        opts = options(2).enableSyntheticData(True)
        loader = poptorch.DataLoader(opts, Counting(), batch_size=2)
        model = network()
        training = poptorch.trainingModel(model, opts, compile=False)
        seen = [training(x, labels)[1] for x, labels in loader]
        assert len(seen) == 3
        assert asked == [0, 1, 2, 3]
        assert bool(torch.isfinite(torch.stack(seen)).all())

    def test_bad_arguments(self):
        set_of = TensorDataset(*data(8))
        with pytest.raises(TypeError, match="options"):
            poptorch.DataLoader(None, set_of)
        with pytest.raises(ValueError, match="drop_last"):
            poptorch.DataLoader(options(1), set_of, drop_last=False)
        with pytest.raises(ValueError, match="batch_size"):
            poptorch.DataLoader(options(1), set_of, batch_size=0)


class TestRefused:
    def test_wrong_batch_size(self):
        training = poptorch.trainingModel(network(), options(3, 2), compile=False)
        with pytest.raises(ValueError, match="gradientAccumulation = 3 x 1 x 2, got 20 samples"):
            training(*data(20))
        inference = poptorch.inferenceModel(network(), options(3), compile=False)
        with pytest.raises(ValueError, match="deviceIterations x replicationFactor = 3 x 1, got 4"):
            inference(data(4)[0])
        x, labels = data(6)
        with pytest.raises(ValueError, match="one length, got 3 and 6"):
            training(x, labels[:3])
        with pytest.raises(ValueError, match="got none"):
            training(3)

    def test_model_without_loss(self):
        training = poptorch.trainingModel(network(), options(1), compile=False)
        with pytest.raises(ValueError, match="the model must return the loss"):
            training(data(4)[0])

    def test_detached_model(self):
        training = poptorch.trainingModel(network(), options(1), compile=False)
        training.detachFromDevice()
        assert not training.isAttachedToDevice()
        with pytest.raises(RuntimeError, match="call attachToDevice"):
            training(*data(4))
        training.attachToDevice()
        training(*data(4))
        training.copyWeightsToHost()

    def test_options(self):
        opts = poptorch.Options()
        for set_it, error, words in (
            (lambda: opts.deviceIterations(0), ValueError, "deviceIterations"),
            (lambda: opts.replicationFactor("2"), TypeError, "replicationFactor"),
            (lambda: opts.outputMode("all"), TypeError, "OutputMode"),
            (lambda: opts.outputMode(OutputMode.EveryN), ValueError, "output_return_period"),
            (lambda: opts.outputMode(OutputMode.All, 2), ValueError, "output_return_period"),
            (lambda: opts.Precision.enableStochasticRounding(True), ValueError, "round to nearest"),
            (lambda: opts.Precision.setPartialsType(torch.half), ValueError, "float32 here"),
            (lambda: opts.useIpuModel(True), AttributeError, "useIpuModel.*deviceIterations"),
        ):
            with pytest.raises(error, match=words):
                set_it()
        opts.Precision.enableStochasticRounding(False).setPartialsType(torch.float32)
        opts.deviceIterations(4).outputMode(OutputMode.EveryN, 3)
        with pytest.raises(ValueError, match="3 must divide deviceIterations, 4"):
            poptorch.inferenceModel(network(), opts, compile=False)(data(4)[0])

    def test_invalid_numbers(self):
        opts = options(1)
        opts.Precision.enableFloatingPointExceptions(True)
        model = network()
        x, labels = data(4)
        training = poptorch.trainingModel(model, opts, compile=False)
        before = model.second.weight.clone()
        with pytest.raises(FloatingPointError):
            training(x * float("inf"), labels)
        assert torch.equal(model.second.weight, before)

    def test_arguments(self):
        with pytest.raises(TypeError, match="optimizer"):
            poptorch.trainingModel(network(), optimizer="sgd")
        with pytest.raises(TypeError, match="compile"):
            poptorch.trainingModel(network(), compile=3)
        with pytest.raises(ValueError, match="for inference has no optimizer"):
            poptorch.inferenceModel(network()).setOptimizer(None)
        with pytest.raises(ValueError, match="reduction"):
            poptorch.identity_loss(torch.ones(2), "max")


def test_optimizer_may_be_replaced():
    model, (x, labels) = network(), data(8)
    training = poptorch.trainingModel(model, options(2), compile=False)
    before = model.second.weight.clone()
    training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    training(x, labels)
    assert torch.equal(model.second.weight, before)
    assert poptorch.identity_loss(torch.tensor([1.0, 3.0])) == 2
    assert poptorch.identity_loss(torch.tensor([1.0, 3.0]), "sum") == 4
    assert len(poptorch.identity_loss(torch.tensor([1.0, 3.0]), "none")) == 2


def test_random_seed_seeds_torch():
    opts = options(1).randomSeed(11)
    poptorch.trainingModel(network(), opts)
    first = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(first, torch.rand(3))


def test_no_cache_without_compilation(tmp_path):
    options = poptorch.Options().enableExecutableCaching(tmp_path)
    with pytest.raises(ValueError, match="leave one of them out"):
        poptorch.inferenceModel(network(), options, compile=False)


def test_ahead_of_time_compilation_changes_nothing():
    """Weights, buffers, gradients, random state and captured pairs are unchanged."""

    class Normed(Network):
        def __init__(self):
            super().__init__(dropout=0.3)
            self.norm = nn.BatchNorm1d(20)

        def forward(self, x, labels=None):
            return super().forward(self.norm(x), labels)

    x, labels = data(3 * 8)
    losses, states = [], []
    for ahead in (False, True):
        torch.manual_seed(0)
        model = ds.sparsify(Normed(), density=0.3, exclude=["second"], verbose=False)
        training = poptorch.trainingModel(
            model, options(3), optimizer=trained(model), compile="aot_eager"
        )
        if ahead:
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            state = torch.get_rng_state()
            training.compile(x, labels)
            assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
            assert all(parameter.grad is None for parameter in model.parameters())
            assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(7)
        losses.append(training(x, labels)[1])
        states.append(model.state_dict())
    assert torch.equal(*losses)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    with pytest.raises(ValueError, match="multiple of deviceIterations"):
        training.compile(x[:4], labels[:4])


def test_connection_types():
    x, labels = data(8)
    made = {
        kind: poptorch.trainingModel(
            network(), poptorch.Options().connectionType(kind), compile="aot_eager"
        )
        for kind in poptorch.ConnectionType
    }
    always, on_demand, never = made.values()
    assert [model.isAttachedToDevice() for model in made.values()] == [True, False, False]
    on_demand(x, labels)
    assert on_demand.isAttachedToDevice()
    never.compile(x, labels)
    for call in (never.attachToDevice, lambda: never(x, labels)):
        with pytest.raises(RuntimeError, match="can only be compiled"):
            call()
    always.detachFromDevice()
    with pytest.raises(RuntimeError, match="attachToDevice"):
        always(x, labels)


def test_memory_and_pages_of_a_target(tmp_path):
    x, labels = data(8)
    opts = poptorch.Options().setAvailableMemoryProportion({"IPU0": 0.25})
    opts.enableProfiling(tmp_path / "pages").modelName("net")
    model = network()
    training = poptorch.trainingModel(model, opts, target=Target(tiles=4))
    training(x, labels)
    assert [file.name for file in (tmp_path / "pages").iterdir()] == ["net-first.html"]
    assert "grad_weight" in (tmp_path / "pages" / "net-first.html").read_text()
    programs = list(training._executors[0][1].runner.layers.values())
    assert [layer.plan.options.available_memory_proportion for layer in programs] == [0.25]
    with pytest.raises(ValueError, match="are for the tile machine"):
        poptorch.inferenceModel(network(), opts)
    for wrong in ({"IPU1": 0.5}, {"IPU0": 0.5, "IPU1": 0.5}, {"IPU0": 1.5}, {}):
        with pytest.raises(ValueError, match="setAvailableMemoryProportion"):
            poptorch.Options().setAvailableMemoryProportion(wrong)
    with pytest.raises(ValueError, match="modelName"):
        poptorch.Options().modelName("a/b")


def test_errors_name_alternatives():
    model = poptorch.inferenceModel(network(), compile=False)
    with pytest.raises(AttributeError, match=r"'compileAndExport' here: .*save_checkpoint"):
        model.compileAndExport("file.poptorch")
    with pytest.raises(AttributeError, match=r"'cycleCount' here: .*machine_profiles"):
        model.cycleCount()
    with pytest.raises(AttributeError, match=r"no 'nonsense' here$"):
        model.nonsense()
