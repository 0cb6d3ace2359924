"""Functions of the data-parallel tests; each runs in every process of a group."""

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
    """Return the weights after each step; `forward_of(model)` computes the outputs."""
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
    """Run the same training in one process with all samples."""
    return train(name, lambda model: model, 0, 1, steps, ranks=None, **options)


def compare_algorithms(rank, size, names, steps):
    """Compare each algorithm with the training in one process.

    Returns:
        {name: (steps with equal patterns, largest difference of weights, final weights)}.
    """
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


def compare_convolutions(rank, size, steps):
    """Train sparse convolutions and compare them with one process.

    Returns:
        (patterns equal, difference of weights) after each update.
    """
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


def compare_accumulation(rank, size, names):
    """Train with three micro-batches per step, the first two of them under no_sync."""
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


def train_with_wrapper_options(rank, size, name):
    """Train with several options and hooks of the wrapper; the trainer is created before it."""
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


def count_hook_calls(rank, size):
    """Return the calls of a communication hook per step; updates change the number of values."""
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


def compare_compiled(rank, size, inside):
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


def train_from_different_seeds(rank, size):
    """Train from models of different seeds, which the wrapper and the trainer synchronize."""
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


def train_until_failure(rank, size, kind):
    """Train with a fault on the last rank before the update of step 3."""
    net = model_of()
    optimizer = optimizer_of(net)
    ddp = DistributedDataParallel(net)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE)
    last = rank == size - 1
    for step in range(1, 5):
        backward(ddp, optimizer, step, rank, size)
        if step == 3 and last:
            _inject_fault(kind, net, trainer)
        trainer.step()


def _inject_fault(kind, net, trainer):
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


def skip_a_layer_on_one_rank(rank, size):
    """Train a layer that the last rank does not use; its gradient is zero there."""
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


def train_independently(rank, size):
    """Run an independent training per rank (ranks=None)."""
    net = model_of(seed=rank)
    optimizer = optimizer_of(net)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE, ranks=None)
    for step in range(1, 8 + 3 * rank):
        backward(net, optimizer, step, rank, size)
        trainer.step()
    return trainer.updates


def train_without_reducing_gradients(rank, size):
    """Train replicas whose gradients are not reduced."""
    net = model_of()
    optimizer = optimizer_of(net)
    trainer = ds.RigL(net, optimizer, schedule=SCHEDULE)
    for step in range(1, 5):
        backward(net, optimizer, step, rank, size)
        trainer.step()


def skip_a_step_on_one_rank(rank, size):
    """Skip a step of the trainer on the last rank, which goes on to the next batch."""
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
    """Return the error of `work` on this rank as text, or ""."""
    try:
        work(rank, size, *arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def replicate_with_dtypes(rank, size):
    """Replicate models whose values have another 16-bit dtype on each rank."""
    ds.distributed.replicate(model_of().to((torch.float16, torch.bfloat16)[rank % 2]))


def run_faults(rank, size):
    """Run each fault with a trainer of its own; the process group stays usable."""
    found = {"alone": str(train_independently(rank, size))}
    for kind in ("nan", "budget", "weights", "pattern", "steps"):
        found[kind] = error_of(rank, size, train_until_failure, kind)
    found["gradients"] = error_of(rank, size, train_without_reducing_gradients)
    found["dtype"] = error_of(rank, size, replicate_with_dtypes)
    return found


def compare_wrappers(rank, size):
    found = {
        f"no_sync, {n}": f for n, f in compare_accumulation(rank, size, ("rigl", "gmp")).items()
    }
    for name in ("rigl", "granet"):
        for kind, steps in train_with_wrapper_options(rank, size, name).items():
            found[f"{kind}, {name}"] = steps
    return found


def measure_trainer_traffic(rank, size):
    """Return {exchange: bytes sent in each step}."""
    return {
        name: _bytes_sent(rank, samples) for name, samples in (("gradients", 512), ("samples", 32))
    }


def _bytes_sent(rank, samples):
    """Return the bytes that this rank's trainer sends in each of four steps, the last one with an
    update of a 1024 x 1024 layer."""
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


def train_with_power_sgd(rank, size, algorithm, options):
    """Train with PowerSGD.

    Returns:
        [(number of blocks, whether errors of gradients are kept) per step], whether all values are
        finite.
    """
    torch.manual_seed(0)
    net = ds.nn.SparseLinear(256, 256, 0.5)
    ddp = DistributedDataParallel(net)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = algorithm(net, optimizer, total_steps=12, update_interval=3, **options)
    seen = []
    for _ in range(12):
        optimizer.zero_grad()
        ddp(torch.randn(16, 256)).square().mean().backward()
        trainer.step()
        seen.append((net.pattern.nnz, bool(state.error_dict)))
    return seen, bool(net.values.isfinite().all())


def measure_wrapper_traffic(rank, size):
    """Return the bytes that the wrapper reduces in each of six steps, one with an update, and the
    bytes of the values, of the dense gradient and of the buffers that it would broadcast."""
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
    """Return the instruction set of this rank, its updates, and its final positions.

    Trains in float32, where the kernels rank scores. Trainers raise if patterns differ.
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
