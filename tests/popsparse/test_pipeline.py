"""Pipelined models over processors: results equal torch, times equal the schedules."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import dynsparse as ds
import popsparse
from popsparse import poptorch
from popsparse.compiled.pipeline import most_batches_in_flight, plan_slots
from popsparse.machine import (
    FLOAT,
    Codelet,
    Engine,
    Execute,
    Graph,
    InOut,
    Parallel,
    Sequence,
    Target,
)

SCHEDULES = ("grouped", "interleaved", "sequential")


def stages(count=2, width=16, sparse=True):
    """Make a model of `count` stages on as many processors."""
    torch.manual_seed(0)
    layers = []
    for stage in range(count):
        generator = torch.Generator().manual_seed(stage)
        layer = ds.nn.SparseLinear(width, width, 0.4, generator=generator)
        layers.append(layer if sparse and stage == 0 else nn.Linear(width, width))
        layers.append(nn.Tanh())
        poptorch.BeginBlock(layers[-2], f"part {stage}", ipu_id=stage)
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(width, 10))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(steps, count, size=6, width=16):
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(steps, count, size, width, generator=generator)
    return x, torch.randint(0, 10, (steps, count, size), generator=generator)


def train_on_host(model, optimizer, x, y):
    """Train on micro-batches on the host; return the losses [steps, batches]."""
    losses = []
    for xs, ys in zip(x, y, strict=True):
        optimizer.zero_grad()
        for inputs, labels in zip(xs, ys, strict=True):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (loss / len(xs)).backward()
            losses.append(loss.item())
        optimizer.step()
    return torch.tensor(losses).view(len(x), -1)


def check(host, optimizer_of, target, pipeline, count, steps=2, replicas=1, **sizes):
    twin = copy.deepcopy(host)
    x, y = batches(steps, count, **sizes)
    torch.manual_seed(1)
    expected = train_on_host(host, optimizer_of(host), x, y)
    torch.manual_seed(1)
    compiled = popsparse.compile(
        twin,
        optimizer_of(twin),
        nn.functional.cross_entropy,
        target,
        pipeline=pipeline,
        gradient_accumulation=count // replicas,
        replicas=replicas,
    )
    losses = [
        compiled.step(*(data if count > 1 else (part[0] for part in data))).view(-1)
        for data in zip(x, y, strict=True)
    ]
    torch.testing.assert_close(torch.stack(losses), expected, atol=1e-5, rtol=1e-5)
    compiled.copy_weights_to_host()
    for (name, weight), other in zip(host.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, weight, atol=1e-5, rtol=1e-5, msg=name)
    return compiled


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_equal_torch(schedule):
    compiled = check(stages(), sgd, Target.pod(2, tiles=8), schedule, 4)
    assert [stage.name for stage in compiled.stages()] == ["part 0", "part 1"]


def test_one_processor_accumulates_gradients():
    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    compiled = check(stages(1), adam, Target.bow(tiles=8), None, 3)
    assert compiled.profiles["step"].parallel_cycles == 0
    with pytest.raises(ValueError, match="the model has no stages: compile it with pipeline="):
        compiled.stages()


def test_clipping_applies_to_the_mean_of_micro_batches():
    host = stages(1)[:1]  # without dropout
    model = copy.deepcopy(host)
    x, y = batches(2, 3)
    optimizer = sgd(host)
    norms = []
    for xs, ys in zip(x, y, strict=True):
        optimizer.zero_grad()
        for inputs, labels in zip(xs, ys, strict=True):
            (nn.functional.cross_entropy(host(inputs), labels) / 3).backward()
        norms.append(float(nn.utils.clip_grad_norm_(host.parameters(), 0.1)))
        optimizer.step()
    assert min(norms) > 0.1
    compiled = popsparse.compile(
        model, sgd(model), nn.functional.cross_entropy, Target.bow(tiles=8),
        clip_grad_norm=0.1, gradient_accumulation=3,
    )  # fmt: skip
    for xs, ys in zip(x, y, strict=True):
        compiled.step(xs, ys)
    compiled.copy_weights_to_host()
    for trained, expected in zip(model.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("replicas", "processors", "schedule", "count"),
    [(2, 2, None, 2), (2, 2, None, 6), (4, 4, None, 4), (2, 4, "interleaved", 8)],
)
def test_replicas_use_the_mean_gradient(replicas, processors, schedule, count):
    model = nn.Sequential(*(m for m in stages() if not isinstance(m, nn.Dropout)))
    target = Target.pod(processors, tiles=8)
    compiled = check(model, sgd, target, schedule, count, replicas=replicas)
    for replica in range(1, replicas):
        for name, variable in compiled._variables.items():
            if name[0] in ("parameter", "state"):
                ours, theirs = (compiled.engine.read(variable, r) for r in (0, replica))
                assert np.array_equal(ours, theirs), name
    step = compiled.profiles["step"]
    steps = [s for s in step.steps if "exchange gradients" in s.name]
    assert [s.runs for s in steps] == [1] * int(np.log2(replicas))
    held = sum(p.numel() for p in model.parameters())
    assert step.link_bytes >= len(steps) * replicas * held * 4


class Skips(nn.Module):
    """Three stages on two processors; the first two send to the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        h = self.first(x).tanh()
        with poptorch.Block("middle", ipu_id=1):
            y = self.second(h).relu()
        with poptorch.Block("end", ipu_id=0):
            return self.head(y * h + x.mean(-1, keepdim=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skips_and_two_stages_of_a_processor(schedule):
    def adam(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    compiled = check(Skips(), adam, Target.pod(2, tiles=4), schedule, 5)
    assert [stage[:2] for stage in compiled.stages()] == [(0, ""), (1, "middle"), (0, "end")]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slots_of_schedules(schedule):
    for count in range(1, 6):
        for n in range(1, 9):
            slots = plan_slots(schedule, count, n)
            at = {one: number for number, slot in enumerate(slots) for one in slot}
            assert len(at) == 2 * count * n  # each pass once
            assert len(slots) == (
                2 * n * count if schedule == "sequential" else 2 * (n + count - 1)
            )
            for (phase, stage, batch), number in at.items():
                if phase == "forward" and stage:
                    assert at["forward", stage - 1, batch] < number
                if phase == "backward":
                    before = ("forward", stage) if stage == count - 1 else ("backward", stage + 1)
                    assert at[(*before, batch)] < number
            held = [most_batches_in_flight(slots, stage) for stage in range(count)]
            assert (
                held
                == {
                    "grouped": [n] * count,
                    "interleaved": [min(n, count - stage) for stage in range(count)],
                    "sequential": [1] * count,
                }[schedule]
            )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_time_of_equal_stages_equals_the_slots(schedule):
    n, count = 5, 3
    graph = Graph(Target.pod(count, tiles=2))
    codelet = Codelet("pass", {"x": InOut()}, lambda v: None, lambda v: 1000, "supervisor")
    passes = []
    for stage in range(count):
        x = graph.add_variable(FLOAT, [1], f"x{stage}", tiles=2 * stage)
        made = graph.add_compute_set(f"pass {stage}")
        graph.add_vertex(made, codelet, 2 * stage, {"x": x})
        passes.append(Execute(made))
    slots = plan_slots(schedule, count, n)
    program = Sequence(*(Parallel({one.stage: passes[one.stage] for one in s}) for s in slots))
    profile = Engine(graph, program).run()
    taken = 2 * n * count if schedule == "sequential" else 2 * (n + count - 1)
    assert profile.cycles == profile.parallel_cycles == 1000 * taken
    assert profile.idle.tolist() == [pytest.approx(1 - 2 * n / taken)] * count


@pytest.mark.slow
def test_times_equal_the_schedules():
    n, runs = 4, {}
    for schedule in SCHEDULES:
        model = stages(3, sparse=False)
        compiled = popsparse.compile(
            model,
            sgd(model),
            nn.functional.cross_entropy,
            Target.pod(4, tiles=4),
            pipeline=schedule,
            gradient_accumulation=n,
        )
        x, y = batches(1, n)
        compiled.step(x[0], y[0])
        runs[schedule] = compiled
        found, profile = compiled.stages(), compiled.profiles["step"]
        # A slot lasts as long as its longest pass; zeros come before and the optimizer after.
        zeros = compiled.operations()["zero gradients"]["cycles"]
        slots = plan_slots(schedule, 3, n)
        passes = [[getattr(found[one.stage], one.phase) for one in slot] for slot in slots]
        updates = [stage.update for stage in found]
        around = profile.parallel_cycles - sum(map(max, passes)) - max(updates)
        assert 0 < around <= zeros
        for processor, stage in enumerate(found):
            spent = n * (stage.forward + stage.backward) + stage.update
            assert 0 < profile.busy[processor] - spent <= zeros
            assert stage.idle == 1 - profile.busy[processor] / profile.parallel_cycles
        assert profile.idle[3] == 1
        sends = len([s for s in profile.steps if s.name.endswith("send") and s.runs])
        # Activations and gradients of two borders, and the learning rate once.
        assert sends > 0
        assert profile.link_bytes >= 4 * n * 2 * 2 * 6 * 16
    cycles = {name: compiled.profiles["step"].cycles for name, compiled in runs.items()}
    assert cycles["grouped"] < cycles["interleaved"] < cycles["sequential"]
    held = {name: [s.batches for s in c.stages()] for name, c in runs.items()}
    assert held == {"grouped": [4] * 3, "interleaved": [3, 2, 1], "sequential": [1] * 3}
    kept = {name: [s.activation_bytes for s in c.stages()] for name, c in runs.items()}
    assert kept["interleaved"][0] == kept["grouped"][0] * 3 // 4 > 6 * 16 * 4
    assert kept["sequential"] == [0, 0, 0]
    assert kept["interleaved"][2] == 0


@pytest.mark.slow
def test_patterns_are_updated_on_the_stages_processors():
    model = nn.Sequential(*stages(), nn.BatchNorm1d(10))
    trainer = ds.RigL(model, sgd(model), total_steps=9, update_interval=2)
    compiled = popsparse.compile(
        model,
        trainer,
        nn.functional.cross_entropy,
        Target.pod(2, tiles=4),
        pipeline="interleaved",
        gradient_accumulation=3,
        device_iterations=2,
    )
    before = model[0].pattern
    x, y = (data.flatten(0, 1) for data in batches(2, 3))
    losses = [compiled.step(x, y) for _ in range(3)]
    assert (trainer.updates, trainer.steps, losses[0].shape) == (2, 6, (6,))
    assert float(losses[2].mean()) < float(losses[0].mean())
    assert model[0].pattern != before
    compiled.copy_weights_to_host()
    assert int(model[6].num_batches_tracked) == 18


def test_replicas_get_the_same_new_pattern():
    model = stages(1)
    trainer = ds.RigL(model, sgd(model), total_steps=9, update_interval=2)
    compiled = popsparse.compile(
        model, trainer, nn.functional.cross_entropy, Target.pod(2, tiles=4),
        device_iterations=2, replicas=2,
    )  # fmt: skip
    before = model[0].pattern
    x, y = (data.flatten(0, 1) for data in batches(4, 1))
    losses = [compiled.step(x, y) for _ in range(3)]
    assert (trainer.updates, trainer.steps, losses[0].shape) == (2, 6, (4,))
    assert float(losses[2].mean()) < float(losses[0].mean())
    assert model[0].pattern != before
    for held in (compiled._layers[0].weights.meta_info, *compiled._layers[0].tensors.values()):
        assert np.array_equal(*(compiled.engine.read(held, replica) for replica in (0, 1)))


def test_bad_input():
    def take_step(model, target, **options):
        compiled = popsparse.compile(
            model, sgd(model), nn.functional.cross_entropy, target, **options
        )
        return compiled.step(*(data[0, 0] for data in batches(1, 1)))

    pod, how = Target.pod(2, tiles=4), {"pipeline": "grouped"}
    with pytest.raises(ValueError, match="block 'part 1' is on processor 1; the target has proces"):
        take_step(stages(), Target.bow(tiles=4), **how)
    tied = stages(sparse=False)
    tied[2].weight = tied[0].weight
    with pytest.raises(NotImplementedError, match=r"'0\.weight' is used by the stages 0 and 1 on"):
        take_step(tied, pod, **how)
    with pytest.raises(
        ValueError, match="pipeline must be one of grouped, interleaved, sequential"
    ):
        take_step(stages(), pod, pipeline="fast")
    with pytest.raises(ValueError, match="clip_grad_norm needs all gradients at once"):
        take_step(stages(), pod, clip_grad_norm=1.0, **how)
    with pytest.raises(ValueError, match="return_output returns that of a whole batch"):
        take_step(stages(), pod, return_output=True, gradient_accumulation=2)
    with pytest.raises(ValueError, match="gradient_accumulation must be an integer of at least 1"):
        take_step(stages(), pod, gradient_accumulation=0)
    with pytest.raises(ValueError, match="replicas must be a power of two, got 3"):
        take_step(stages(), pod, replicas=3)
    with pytest.raises(ValueError, match="replicas must share 2 processors evenly, got 4"):
        take_step(stages(1), pod, replicas=4)
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
        poptorch.BeginBlock("first")
    with pytest.raises(ValueError, match="ipu_id must be an integer of at least 0"):
        poptorch.Block(ipu_id=-1)
    model = stages()
    compiled = popsparse.compile(
        model, sgd(model), nn.functional.cross_entropy, pod, gradient_accumulation=3
    )
    with pytest.raises(ValueError, match="expected tensors of 3 batches"):
        compiled.step(*(data[0] for data in batches(1, 2)))
