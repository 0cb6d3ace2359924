"""Traces: contents of the file, and no effect on training."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from chrome import counts, inside, names, read, share, spans
from torch import nn

import dynsparse as ds
import popsparse
from dynsparse.tracing import counter, span, spanned
from dynsparse.tracing.chrome_trace import rank_path
from dynsparse.tracing.spans import OFF, active_recorder
from dynsparse.training.checkpoint import load_checkpoint, save_checkpoint


def network():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4))
    return ds.sparsify(layers, density=0.2, exclude=["2"], verbose=False)


def trainer_of(model, kind=ds.RigL):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return kind(model, optimizer, total_steps=100, update_interval=4)


def steps(model, trainer, count, own_step=False):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(8, 32, generator=generator, requires_grad=True)
        trainer.optimizer.zero_grad()
        model(x).square().mean().backward()
        (trainer.optimizer if own_step else trainer).step()


@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("kind", [ds.RigL, ds.SET])
def test_custom_loop_has_the_spans_of_a_training(tmp_path, kind, own_step):
    model = network()
    trainer = trainer_of(model, kind)
    file = tmp_path / "run.json"
    with ds.trace(file):
        steps(model, trainer, 9, own_step)
    document = read(file)
    for name in ("forward", "backward", "optimizer"):
        assert len(spans(document, name)) == 9, name
    assert len(spans(document, "update")) == 2
    assert {"drop", "grow", "rewire"} <= inside(document, "update")
    assert not {"update", "drop", "forward", "backward"} & inside(document, "optimizer")
    assert len(counts(document, "density")) == len(counts(document, "churn")) == 2
    layer = model[0]
    assert counts(document, "density")[-1] == pytest.approx(layer.density)
    # The cosine begins near 0.3, and integers round down.
    assert all(0.2 < churn < 0.3 for churn in counts(document, "churn"))
    assert {event["args"]["layer"] for event in spans(document, "drop")} == {"0"}
    assert document["otherData"]["whole"]


def test_column_order_is_a_span(tmp_path):
    model = network()
    with ds.trace(tmp_path / "run.json"):
        model[0]._current().index.column_order()
    assert names(read(tmp_path / "run.json")) == {"encode"}


def test_order_of_spans(tmp_path):
    model = network()
    trainer = trainer_of(model)
    with ds.trace(tmp_path / "run.json"):
        steps(model, trainer, 4)
    outer = [
        event["name"]
        for event in spans(read(tmp_path / "run.json"))
        if event["name"] in ("forward", "backward", "optimizer", "update")
    ]
    assert outer == ["forward", "backward", "optimizer"] * 4 + ["update"]


def test_trace_does_not_change_results(tmp_path):
    models = [network(), network()]
    for model, traced in zip(models, (False, True), strict=True):
        trainer = trainer_of(model)
        if traced:
            with ds.trace(tmp_path / "run.json"):
                steps(model, trainer, 12)
        else:
            steps(model, trainer, 12)
    for a, b in zip(*(m.state_dict().values() for m in models), strict=True):
        assert torch.equal(a, b)


def test_nothing_is_left_behind(tmp_path):
    model = network()
    trainer = trainer_of(model)
    before = {name: dict(vars(one)) for name, one in model.named_modules()}
    with ds.trace(tmp_path / "run.json"):
        steps(model, trainer, 1)
    assert active_recorder() is None
    assert span("a", b=1) is OFF
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert {name: vars(one).keys() for name, one in model.named_modules()} == {
        name: one.keys() for name, one in before.items()
    }
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_torch_profiler_shows_the_same_names():
    model = network()
    trainer = trainer_of(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with span("data"):
            pass
        steps(model, trainer, 4)
    shown = {event.key for event in profile.key_averages()}
    assert {"data", "optimizer", "update", "drop", "grow", "rewire"} <= shown


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_error_leaves_a_complete_file(tmp_path, error):
    file = tmp_path / "run.json"
    file.write_text("an older one")
    with pytest.raises(error), ds.trace(file), span("outer"), span("inner"):
        raise error
    assert [event["name"] for event in spans(read(file))] == ["outer", "inner"]
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


def test_failing_update_leaves_no_open_span(tmp_path):
    model = network()
    trainer = trainer_of(model)
    trainer.drop_score = lambda values: torch.full_like(values, torch.nan)
    file = tmp_path / "run.json"
    with ds.trace(file):
        steps(model, trainer, 3)
        with pytest.raises(ValueError, match="NaN"):
            steps(model, trainer, 1)
        trainer.drop_score = torch.abs
        trainer.after_optimizer_step()
        steps(model, trainer, 1)
    document = read(file)
    assert len(spans(document, "optimizer")) == 5
    assert {"drop", "grow"} <= names(document)


def test_bad_arguments_raise(tmp_path):
    for place in (tmp_path, tmp_path / "none" / "run.json"):
        with pytest.raises(ValueError, match="folder that can be written"), ds.trace(place):
            pass
    with pytest.raises(ValueError, match="limit"), ds.trace(tmp_path / "run.json", limit=0):
        pass
    with pytest.raises(TypeError, match="file must be a path"), ds.trace(3):
        pass
    with ds.trace(tmp_path / "run.json"):
        with pytest.raises(ValueError, match="active already"), ds.trace(tmp_path / "other.json"):
            pass
        assert active_recorder() is not None
    assert not (tmp_path / "other.json").exists()


def test_last_events_are_kept_beyond_the_limit(tmp_path):
    with ds.trace(tmp_path / "run.json", limit=3):
        for number in range(5):
            with span(f"number {number}"):
                pass
    document = read(tmp_path / "run.json")
    assert [event["name"] for event in spans(document)] == ["number 2", "number 3", "number 4"]
    assert not document["otherData"]["whole"]


def test_names_and_arguments_may_be_any_text(tmp_path):
    with ds.trace(tmp_path / "run.json"):
        with span('quoted " \n Ω', layer='"0"', size=3, share=float("nan"), shape=(1, 2)):
            counter('also " quoted', torch.tensor(2.0))
        counter("loss", float("inf"))
        counter("loss", float("nan"))
        counter("loss", 10**400)
        with pytest.raises(TypeError, match="value must be a number or a tensor of one"):
            counter("loss", torch.ones(2))
    document = read(tmp_path / "run.json")
    (event,) = spans(document)
    assert event["name"] == 'quoted " \n Ω'
    assert event["args"] == {"layer": '"0"', "size": 3, "share": "nan", "shape": "(1, 2)"}
    assert counts(document, 'also " quoted') == [2.0]
    assert counts(document, "loss") == []


def test_each_thread_has_a_lane(tmp_path):
    @spanned("work")
    def work():
        time.sleep(0)

    with ds.trace(tmp_path / "run.json"):
        thread = threading.Thread(target=work, name="another")
        thread.start()
        thread.join()
        work()
    document = read(tmp_path / "run.json")
    assert len({event["tid"] for event in spans(document, "work")}) == 2
    threads = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert sorted(threads) == ["MainThread", "another"]


def test_share_of_time(tmp_path, monkeypatch):
    """By hand, with a clock that advances by a microsecond per reading."""
    now = iter(range(1, 10**9, 1000))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(now))
    with ds.trace(tmp_path / "run.json"):  # 0
        with span("a"):  # 1
            pass  # 2
        with span("b"), span("c"):  # 3, 4
            pass  # 5, 6
    document = read(tmp_path / "run.json")  # 7
    assert [event["dur"] for event in spans(document)] == [1.0, 3.0, 1.0]
    assert share(document) == pytest.approx(4 / 7)


def test_checkpoints_and_machine_runs_are_spans(tmp_path):
    model = network()
    trainer = trainer_of(model)
    graph = popsparse.machine.Graph(popsparse.machine.Target(tiles=2))
    graph.add_variable(popsparse.machine.FLOAT, [4], "a", tiles=0)
    with ds.trace(tmp_path / "run.json"):
        path = tmp_path / "a.ckpt"
        save_checkpoint(path, model=model, optimizer=trainer.optimizer, trainer=trainer)
        load_checkpoint(path, model=model)
        popsparse.machine.Engine(graph, popsparse.machine.Sequence()).run()
    document = read(tmp_path / "run.json")
    assert len(spans(document, "checkpoint")) == 2
    assert len(spans(document, "machine run")) == 1


def test_nested_models_and_copies_have_one_span(tmp_path):
    inner = network()
    outer = nn.Sequential(inner, nn.Linear(4, 2))
    first, second = trainer_of(inner), trainer_of(outer)
    with ds.trace(tmp_path / "run.json"):
        outer(torch.randn(2, 32)).sum().backward()
        copied = copy.deepcopy(outer)
    copied(torch.randn(2, 32))
    document = read(tmp_path / "run.json")
    assert len(spans(document, "forward")) == len(spans(document, "backward")) == 1
    del first, second


def test_error_in_forward_does_not_affect_the_next_one(tmp_path):
    model = network()
    trainer = trainer_of(model)
    with ds.trace(tmp_path / "run.json"):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 31))
        steps(model, trainer, 1)
    assert len(spans(read(tmp_path / "run.json"), "forward")) == 2


def test_transforms_and_compile_of_a_traced_model(tmp_path):
    model = network()
    trainer = trainer_of(model)
    x = torch.randn(4, 32)
    expected = model(x).detach()
    with ds.trace(tmp_path / "run.json"):
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(x).detach(), expected)
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters):
            return torch.func.functional_call(model, parameters, x).sum()

        gradients = torch.func.grad(loss)(parameters)
    assert gradients.keys() == parameters.keys()
    read(tmp_path / "run.json")
    del trainer


def test_ranks_write_separate_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "2")
    with ds.trace(tmp_path / "run.json"), span("a"):
        pass
    document = read(tmp_path / "run.rank2.json")
    assert document["otherData"]["rank"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["run.rank2.json"]
    assert rank_path(tmp_path / "run.json", 0) == tmp_path / "run.json"
