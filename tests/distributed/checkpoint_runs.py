"""Functions of the checkpoint tests that run on every rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sharded_models as models
import torch
from slot_order import row_major
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import dropout, mse_loss
from torch.nn.parallel import DistributedDataParallel

import dynsparse as ds
from dynsparse.distributed import gather, replicate, split
from dynsparse.distributed.sharded_layer import spec_of
from dynsparse.training import ConstantSchedule

KINDS = ("ddp", "fsdp")
EVERY = ConstantSchedule(total_steps=10**6, update_interval=1, drop_fraction=0.2)
TRAINERS = {
    "static": (ds.Static, {}),
    "rigl": (ds.RigL, {"schedule": EVERY}),
    "set": (ds.SET, {"schedule": EVERY, "seed": 4}),
    "snfs": (ds.SNFS, {"schedule": EVERY, "window": 3}),
    "snfs-dense": (ds.SNFS, {"schedule": EVERY, "window": None}),
    "snfs-dense-fixed": (ds.SNFS, {"schedule": EVERY, "window": None, "redistribute": False}),
}


def make(kind, size, seed=0, algorithm="static"):
    """Return (wrapped model, model, optimizer, trainer)."""
    model = models.linear_model(seed=seed)
    if kind == "grid":  # x lies over two ranks, the samples over the others
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("z", "x"))
        split(model, mesh)
        wrapped = replicate(model, ranks=mesh["z"])
    elif kind == "shards of a grid":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("z", "x"))
        split(model, mesh)
        wrapped = models.shard(model, mesh["z"])
    elif kind == "fsdp":
        wrapped = models.shard(model, init_device_mesh("cpu", (size,)))
    elif kind == "ddp":
        wrapped = DistributedDataParallel(model, forward_sync_buffers=False)
    else:
        wrapped = model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    chosen, options = TRAINERS[algorithm]
    trainer = chosen(model, optimizer, **options, ranks=None if kind == "alone" else "auto")
    return wrapped, model, optimizer, trainer


def train(made, first, last):
    wrapped, _, optimizer, trainer = made
    for step in range(first, last):
        x, y = models.share(step, trainer.ranks.rank, trainer.ranks.size)
        optimizer.zero_grad()
        mse_loss(wrapped(x), y).backward()
        trainer.step()


def reference(last, algorithm="static"):
    made = make("alone", 1, algorithm=algorithm)
    train(made, 0, last)
    return made


def gather_slots(part, layer, kept):
    """Gather a tensor with an entry per slot of each shard, in the slot order of the full layer."""
    slots, total = part.slots(layer.pattern)
    whole = kept.new_zeros(total)
    if part.grid.z.is_lead_rank(part.axes):
        whole[slots] = kept
    return part.grid.all_ranks.sum(whole)


def states_of(made):
    """Return the dense weights and the optimizer state of the values, gathered from all ranks."""
    _, model, optimizer, _ = made
    found = {}
    for key in (None, "exp_avg", "exp_avg_sq"):
        state = gather(model)
        if key is not None:
            for name, layer in models.layers_of(model).items():
                kept = models.whole(optimizer.state[layer.values][key])
                spec = spec_of(layer)
                state[f"{name}.values"] = kept if spec is None else gather_slots(spec, layer, kept)
        state = row_major({key: models.whole(tensor) for key, tensor in state.items()})
        for name, layer in models.layers_of(model).items():
            rows, cols, values = (state[f"{name}.{part}"] for part in ("rows", "cols", "values"))
            whole = spec_of(layer)
            shape = layer.pattern.shape if whole is None else whole.shape
            pattern = ds.SparsePattern(rows, cols, shape=shape)
            found[name, key] = pattern.to_dense(values.detach())
            found[name, "pattern"] = pattern.to_mask().double()
    return found


def resume_and_save(rank, size, kind, source, target, first, last, algorithm="static"):
    """Load `source` into a model of another pattern, train, and save `target`.

    Returns:
        (largest difference from the training in one process, steps of the trainer).
    """
    made = make(kind, size, seed=0 if source is None else 9, algorithm=algorithm)
    parts = {"model": made[1], "optimizer": made[2], "trainer": made[3]}
    own = models.layers_of(made[1])["0"].pattern
    before = own.flat.clone()
    if source is not None:
        extra = ds.training.load_checkpoint(source, **parts)
        assert extra == {"at": first, "some": [1.5, (2, None)]}
        assert torch.equal(own.flat, before)  # the old pattern is another object
    train(made, first, last)
    ds.training.save_checkpoint(target, **parts, extra={"at": last, "some": [1.5, (2, None)]})
    ours, expected = states_of(made), states_of(reference(last, algorithm))
    off = max(float((ours[key] - one).abs().max()) for key, one in expected.items())
    return off, made[3].steps


def compare_momenta(rank, size, path):
    """Compare SNFS's momentum with that of a single process, before and after a checkpoint.

    Returns:
        ([difference of the mean over ranks before, after], the momentum in this rank's state_dict).
    """
    made = make("ddp", size, algorithm="snfs-dense")
    train(made, 0, 3)
    expected = reference(3, "snfs-dense")[3].state_dict()["history_state"]["momentum"]
    own = made[3].state_dict()["history_state"]["momentum"]
    parts = {"model": made[1], "optimizer": made[2], "trainer": made[3]}
    ds.training.save_checkpoint(path, **parts)
    fresh = make("ddp", size, seed=9, algorithm="snfs-dense")
    ds.training.load_checkpoint(path, model=fresh[1], optimizer=fresh[2], trainer=fresh[3])
    again = fresh[3].state_dict()["history_state"]["momentum"]
    assert all(torch.equal(again[name], own[name]) for name in own)
    return [_mean_difference(own, expected), _mean_difference(again, expected)], own


def _mean_difference(own, expected):
    """Return the largest difference between the mean of `own` over the ranks and `expected`."""
    size = torch.distributed.get_world_size()
    worst = 0.0
    for name, matrix in own.items():
        total = matrix.clone()
        torch.distributed.all_reduce(total)
        worst = max(worst, float((total / size - expected[name]).abs().max()))
    return worst


def restore_generators(rank, size, path):
    """Check that a checkpoint restores this rank's generators and its dropout mask."""
    _, model, optimizer, trainer = make("ddp", size)
    given = torch.Generator().manual_seed(rank)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    ds.training.save_checkpoint(path, **parts, generators={"data": given})

    def draw():
        return [*torch.rand(2).tolist(), *torch.rand(2, generator=given).tolist()]

    expected, mask = draw(), dropout(torch.ones(99), 0.5)
    ds.training.load_checkpoint(path, **parts, generators={"data": given})
    assert draw() == expected
    assert torch.equal(dropout(torch.ones(99), 0.5), mask)
    return expected


def collect_errors(rank, size, folder):
    """Collect the errors of failing saves and loads; files and models stay unchanged."""
    folder = Path(folder)
    _, model, optimizer, _ = make("fsdp", size)
    parts = {"model": model, "optimizer": optimizer}
    said = []

    def expect(error, match, work):
        with pytest.raises(error, match=match) as found:
            work()
        said.append(str(found.value))
        torch.distributed.barrier()

    good = folder / "good"
    ds.training.save_checkpoint(good, **parts)
    before = [(folder / name).read_bytes() for name in sorted(os.listdir(folder))]
    torch.distributed.barrier()
    extra = {"odd": {1, 2} if rank == 1 else None}
    expect(TypeError, "rank 1: .*found <class 'set'>", lambda: ds.training.save_checkpoint(
        good, **parts, extra=extra))  # fmt: skip
    expect(ds.training.CheckpointError, "FileNotFoundError", lambda: (
        ds.training.load_checkpoint(folder / "none", **parts)))  # fmt: skip
    expect(RuntimeError, "FileNotFoundError", lambda: ds.training.save_checkpoint(
        folder / "none" / "c", **parts))  # fmt: skip
    assert [(folder / name).read_bytes() for name in sorted(os.listdir(folder))] == before
    ds.training.load_checkpoint(good, **parts)
    other = models.shard(models.linear_model(density=0.3), init_device_mesh("cpu", (size,)))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    expect(ds.training.CheckpointError, "does not fit: layer '0' was saved with", lambda: (
        ds.training.load_checkpoint(good, model=other)))  # fmt: skip
    for name, tensor in other.state_dict().items():
        assert torch.equal(models.whole(tensor), models.whole(before[name]))
    apart = models.linear_model(seed=rank)
    second = torch.optim.SGD(apart.parameters(), lr=0.1)
    expect(ValueError, "ranks disagree on the pattern of layer '0'", lambda: (
        ds.training.save_checkpoint(folder / "apart", model=apart, optimizer=second)))  # fmt: skip
    assert not (folder / "apart").exists()
    torch.distributed.barrier()
    if rank == 0:
        (data,) = folder.glob("good.*-1")
        raw = bytearray(data.read_bytes())
        raw[-1] ^= 1
        data.write_bytes(raw)
    torch.distributed.barrier()
    expect(ds.training.CheckpointError, "is damaged", lambda: ds.training.load_checkpoint(
        good, **parts))  # fmt: skip
    torch.distributed.barrier()
    if rank == 0:
        data.unlink()
    torch.distributed.barrier()
    expect(ds.training.CheckpointError, "is missing: expected the files of 2 ranks", lambda: (
        ds.training.load_checkpoint(good, **parts)))  # fmt: skip
    return said


def save_in_background(rank, size, kind, path):
    """Save with wait=False and train on; the checkpoint holds the state at the call.

    Returns:
        The largest difference between the loaded model and the expected one.
    """
    made = make(kind, size)
    parts = {"model": made[1], "optimizer": made[2], "trainer": made[3]}
    saving = None
    for at in range(3):
        saving = ds.training.save_checkpoint(path, **parts, extra={"at": at}, wait=False)
        train(made, at, at + 1)
    saving.wait()
    assert saving.done
    fresh = make(kind, size, seed=5)
    found = ds.training.load_checkpoint(path, model=fresh[1], optimizer=fresh[2])
    assert found == {"at": 2}
    assert len(os.listdir(Path(path).parent)) == size  # earlier ones have made room
    bad = ds.training.save_checkpoint(f"{path}/below", **parts, wait=False)
    with pytest.raises(RuntimeError, match="NotADirectoryError"):
        bad.wait()
    return models.off_by(fresh[1], reference(2)[1])


def resume_hybrid_sharded(rank, size, path):
    """Save and load a hybrid-sharded model with a dense layer that is sharded by columns."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    def built(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(models.linear_model(seed=seed), torch.nn.Linear(8, 64).double())
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        for layer in models.layers_of(model).values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model[1], mesh=mesh["shard"],
                    shard_placement_fn=lambda p: Shard(p.dim() - 1))  # fmt: skip
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    (model, optimizer), (other, second) = built(0), built(1)
    ds.training.save_checkpoint(path, model=model, optimizer=optimizer)
    ds.training.load_checkpoint(path, model=other, optimizer=second)
    for name, tensor in model.state_dict().items():
        assert torch.equal(models.whole(tensor), models.whole(other.state_dict()[name])), name
    return True
