"""What the ranks of the data parallel tests do: each function runs in a process of its own."""

from __future__ import annotations

import os

import torch
from rank_trainings import (
    ALGORITHMS,
    EVERY,
    SCHEDULE,
    apart,
    backward,
    batch,
    layers_of,
    model_of,
    optimizer_of,
    weights,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import dynsparse as ds
from dynsparse._core import native


def train(name, forward_of, rank, size, steps, *, kind="sgd", passes=1, ranks="auto", **model):
    """The weights after each step; `forward_of(model)` is what the loss goes through."""
    net = model_of(**model)
    optimizer = optimizer_of(net, kind)
    forward = forward_of(net)
    trainer = ALGORITHMS[name](net, optimizer, ranks=ranks)
    seen = []
    for step in range(1, steps + 1):
        backward(forward, optimizer, step, rank, size, passes)
        trainer.step()
        seen.append(weights(net))
    return seen


def alone(name, steps, **options):
    """The same training in one process that has all samples."""
    return train(name, lambda model: model, 0, 1, steps, ranks=None, **options)


def compared(rank, size, names, steps):
    """For each algorithm how many updates were as in one process, and how far weights are apart."""
    found = {}
    for name in names:
        seen = train(name, DistributedDataParallel, rank, size, steps)
        against = [apart(a, b) for a, b in zip(alone(name, steps), seen, strict=True)]
        same = sum(one for one, _ in against)
        bits = {n: w for n, (_, w) in seen[-1].items()}
        found[name] = (same, max(d for _, d in against), bits)
    return found


def _convolutions():
    g = torch.Generator().manual_seed(0)
    options = {"density": 0.3, "generator": g, "dtype": torch.float64}
    torch.manual_seed(0)
    return nn.Sequential(
        ds.nn.SparseConv2d(4, 8, 3, padding=1, **options), nn.ReLU(),
        ds.nn.SparseConv2d(8, 6, (2, 3), 2, groups=2, block_size=1, **options), nn.Flatten(),
        nn.Linear(6 * 4 * 3, 5, dtype=torch.float64),
    )  # fmt: skip


def convolved(rank, size, steps):
    """After each update whether both patterns are as in one process, and how far weights are."""
    nets = [_convolutions(), _convolutions()]
    optimizers = [optimizer_of(net) for net in nets]
    forwards = [DistributedDataParallel(nets[0]), nets[1]]
    trainers = [
        ds.RigL(net, optimizer, schedule=EVERY, **options)
        for net, optimizer, options in zip(nets, optimizers, [{}, {"ranks": None}], strict=True)
    ]
    data = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(4 * size, 4, 8, 8, generator=data, dtype=torch.float64)
        y = torch.randn(4 * size, 5, generator=data, dtype=torch.float64)
        own = slice(4 * rank, 4 * rank + 4), slice(None)
        for forward, optimizer, trainer, part in zip(
            forwards, optimizers, trainers, own, strict=True
        ):
            optimizer.zero_grad()
            nn.functional.mse_loss(forward(x[part]), y[part]).backward()
            trainer.step()
        one, other = (
            {name: (layer.pattern.flat, layer.to_dense().detach())
             for name, layer in trainer.layers.items()}
            for trainer in trainers
        )  # fmt: skip
        found.append(apart(one, other))
    assert list(trainers[0].layers) == ["0", "2"]
    assert trainers[0].updates == steps
    return found


def accumulated(rank, size, names):
    """Three micro-batches a step, the first two of them under no_sync."""
    found = {}
    for name in names:
        reference = alone(name, 6, passes=3)
        net = model_of()
        optimizer = optimizer_of(net)
        ddp = DistributedDataParallel(net)
        trainer = ALGORITHMS[name](ddp, optimizer)
        assert list(trainer.layers) == ["0", "2"], "named as in the model"
        seen = []
        for step in range(1, len(reference) + 1):
            with ddp.no_sync():
                backward(ddp, optimizer, step, rank, size, 3, range(2))
            backward(ddp, optimizer, step, rank, size, 3, range(2, 3))
            trainer.step()
            seen.append(weights(net))
        found[name] = [apart(a, b) for a, b in zip(reference, seen, strict=True)]
    return found


def wrapped_otherwise(rank, size, name):
    """Options and hooks of the wrapper; the trainer made before it."""
    wrappers = {
        "views": lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
        "static": lambda m: DistributedDataParallel(m, static_graph=True),
        "unused": lambda m: DistributedDataParallel(m, find_unused_parameters=True),
        "hook": _hooked,
        "replicate": ds.distributed.replicate,
    }
    found = {}
    reference = alone(name, 6, kind="adam")
    for kind, wrap in wrappers.items():
        net = model_of()
        optimizer = optimizer_of(net, "adam")
        trainer = ALGORITHMS[name](net, optimizer)
        ddp = wrap(net)
        seen = []
        for step in range(1, len(reference) + 1):
            backward(ddp, optimizer, step, rank, size)
            trainer.step()
            seen.append(weights(net))
        found[kind] = [apart(a, b) for a, b in zip(reference, seen, strict=True)]
    return found


def _hooked(model):
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, _counted)
    return ddp


def _counted(state, bucket):
    _counted.calls += 1
    return default_hooks.allreduce_hook(torch.distributed.group.WORLD, bucket)


_counted.calls = 0


def hooks_stay(rank, size):
    """Calls of a communication hook before and after updates that change sizes."""
    net = model_of()
    optimizer = optimizer_of(net)
    ddp = _hooked(net)
    trainer = ALGORITHMS["gmp"](net, optimizer)
    calls = []
    for step in range(1, 9):
        before = _counted.calls
        backward(ddp, optimizer, step, rank, size)
        trainer.step()
        calls.append(_counted.calls - before)
    return calls, [layer.pattern.nnz for layer in layers_of(net).values()]


def compiled(rank, size, inside):
    reference = alone("rigl", 5)
    net = model_of()
    optimizer = optimizer_of(net)
    if inside:
        forward = DistributedDataParallel(torch.compile(net))
    else:
        forward = torch.compile(DistributedDataParallel(net))
    trainer = ALGORITHMS["rigl"](net, optimizer)
    seen = []
    for step in range(1, len(reference) + 1):
        backward(forward, optimizer, step, rank, size)
        trainer.step()
        seen.append(weights(net))
    return [apart(a, b) for a, b in zip(reference, seen, strict=True)]


def layers_begin_apart(rank, size):
    """Ranks seeded apart: the wrapper and the trainer put all right from the first."""
    found = []
    for first in ("wrapper", "trainer"):
        net = model_of(seed=rank)
        optimizer = optimizer_of(net)
        if first == "wrapper":
            ddp = DistributedDataParallel(net)
            trainer = ds.SET(net, optimizer, schedule=SCHEDULE)
        else:
            trainer = ds.SET(net, optimizer, schedule=SCHEDULE)
            ddp = DistributedDataParallel(net)
        for step in range(1, 5):
            backward(ddp, optimizer, step, rank, size)
            trainer.step()
        found.append(weights(net))
    return found


def failing(rank, size, kind):
    """The last rank goes wrong before the update of step 3."""
    net = model_of()
    optimizer = optimizer_of(net)
    ddp = DistributedDataParallel(net)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE)
    last = rank == size - 1
    for step in range(1, 5):
        backward(ddp, optimizer, step, rank, size)
        if step == 3 and last:
            _go_wrong(kind, net, trainer)
        trainer.step()


def _go_wrong(kind, net, trainer):
    if kind == "nan":
        trainer._captures["2"][0][1][0, 0] = torch.nan
    elif kind == "budget":
        trainer.budget = ds.training.GlobalBudget()
    elif kind == "weights":
        net[0].values.data.fill_(torch.nan)
    elif kind == "pattern":
        flat = net[2].pattern.flat.clone()
        flat[0] = next(i for i in range(net[2].pattern.total) if i not in flat.tolist())
        shape = net[2].pattern.shape
        net[2].set_pattern(ds.SparsePattern.from_flat(flat.sort().values, shape=shape))
    elif kind == "steps":
        trainer.steps = 5  # as after loading the state of another step


def one_leaves_a_layer_out(rank, size):
    """A layer that the last rank's samples do not come through; which counts as zeros there."""
    net = model_of()
    optimizer = optimizer_of(net)
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE)
    head, skipped = net[2], rank == size - 1
    net.forward = lambda x: net[1](net[0](x)) if skipped else head(net[1](net[0](x)))
    for step in range(1, 8):
        x, _ = batch(step, rank, size)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        trainer.step()
    return trainer.updates, weights(net)


def trained_alone(rank, size):
    """Two trainings side by side, which do not know of each other."""
    net = model_of(seed=rank)
    optimizer = optimizer_of(net)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE, ranks=None)
    for step in range(1, 8 + 3 * rank):
        backward(net, optimizer, step, rank, size)
        trainer.step()
    return trainer.updates


def not_one_model(rank, size):
    """Ranks that a trainer takes for replicas, and nobody adds up their gradients."""
    net = model_of()
    optimizer = optimizer_of(net)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE)
    for step in range(1, 5):
        backward(net, optimizer, step, rank, size)
        trainer.step()


def missing(rank, size):
    """The last rank leaves out a step of the trainer, and goes on to the next batch."""
    net = model_of()
    optimizer = optimizer_of(net)
    ddp = DistributedDataParallel(net)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE)
    for step in range(1, 6):
        if step == 3:
            trainer.ranks.timeout = 2.0
        backward(ddp, optimizer, step, rank, size)
        if step != 3 or rank != size - 1:
            trainer.step()


def error_of(rank, size, work, *arguments):
    """What `work` raises here."""
    try:
        work(rank, size, *arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def faults(rank, size):
    """Every fault in turn, each with its own trainer; they leave the group usable."""
    found = {"alone": str(trained_alone(rank, size))}
    for kind in ("nan", "budget", "weights", "pattern", "steps"):
        found[kind] = error_of(rank, size, failing, kind)
    found["gradients"] = error_of(rank, size, not_one_model)
    return found


def kinds(rank, size):
    found = {f"no_sync, {n}": f for n, f in accumulated(rank, size, ("rigl", "gmp")).items()}
    for name in ("rigl", "granet"):
        for kind, steps in wrapped_otherwise(rank, size, name).items():
            found[f"{kind}, {name}"] = steps
    return found


def traffic(rank, size):
    """By what is sent: what `_sent` says."""
    return {name: _sent(rank, samples) for name, samples in (("gradients", 512), ("samples", 32))}


def _sent(rank, samples):
    """Bytes that this rank's trainer sends in each of four steps, the last one with an update of
    1024 x 1024 at density 0.1."""
    g = torch.Generator().manual_seed(rank)
    net = ds.nn.SparseLinear(1024, 1024, 0.1, generator=torch.Generator(), bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp = DistributedDataParallel(net)
    schedule = ds.training.ConstantSchedule(100, 4, 0.3)
    trainer = ds.RigL(net, optimizer, schedule=schedule)
    moved = []
    for _ in range(4):
        optimizer.zero_grad()
        before = trainer.ranks.sent
        ddp(torch.randn(samples, 1024, generator=g)).square().mean().backward()
        trainer.step()
        moved.append(trainer.ranks.sent - before)
    assert trainer.updates == 1
    return moved


def with_power_sgd(rank, size):
    """The numbers of blocks after a training whose gradients PowerSGD compresses."""
    torch.manual_seed(0)
    net = ds.nn.SparseLinear(256, 256, 0.5)
    ddp = DistributedDataParallel(net)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = ds.GMP(net, optimizer, total_steps=12, update_interval=3, final_density=0.1)
    seen = []
    for _ in range(12):
        optimizer.zero_grad()
        ddp(torch.randn(16, 256)).square().mean().backward()
        trainer.step()
        seen.append(net.pattern.nnz)
    return seen, bool(net.values.isfinite().all())


def step_traffic(rank, size):
    """Bytes that the wrapper sums up over ranks in each of six steps, an update among them; those
    of the values, of the dense gradient, and of the buffers that it would broadcast."""
    net = ds.nn.SparseLinear(1024, 1024, 0.1, generator=torch.Generator(), bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp = DistributedDataParallel(net)
    sent = []

    def counted(state, bucket):
        sent[-1] += bucket.buffer().nbytes
        return default_hooks.allreduce_hook(torch.distributed.group.WORLD, bucket)

    ddp.register_comm_hook(None, counted)
    schedule = ds.training.ConstantSchedule(100, 4, 0.3)
    trainer = ds.RigL(net, optimizer, schedule=schedule)
    for _ in range(6):
        sent.append(0)
        optimizer.zero_grad()
        ddp(torch.randn(8, 1024)).square().mean().backward()
        trainer.step()
    assert trainer.updates == 1
    return sent, net.values.nbytes, 4 * 1024**2, sum(b.nbytes for b in ddp.modules_buffers)


def instructions(
    rank: int, size: int, name: str, updates: int, isas: list[str]
) -> tuple[str, int, dict[str, torch.Tensor]]:
    """The instruction set of this rank, its updates, and the positions that it ends with.

    In float32, which the kernels rank. Trainers compare patterns at every update, and raise.
    """
    os.environ["DYNSPARSE_ISA"] = isas[rank]
    net = model_of(dtype=torch.float32)
    optimizer = optimizer_of(net)
    ddp = DistributedDataParallel(net)
    trainer = ALGORITHMS[name](net, optimizer)
    for step in range(1, 2 * updates):
        x, y = batch(step, rank, size, dtype=torch.float32)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        trainer.step()
        if trainer.updates == updates:
            break
    return (
        str(native.describe()["isa"]),
        trainer.updates,
        {layer: flat for layer, (flat, _) in weights(net).items()},
    )
