"""Kills ranks of trainings at random moments; torch's elastic agent starts them anew.

    python tests/distributed/kills.py --kills 300 --ranks 2 4 --log kills.jsonl

With a log, an interrupted campaign resumes: trainings in the log are counted and not repeated.

Each training is killed several times and must end, on every rank, bit for bit as the same training
without a kill. The agent is the one of torchrun; its workers are forked from a server that has
imported torch, so that a start takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from processes import PRELOADED

STEPS = 24
AGAIN = 100  # starts beyond the kills: gloo does not always find its peers at once


def train(folder, kind, kills, longest, wait):
    """Run one rank: resume from the last checkpoint, train, write a digest of the final state."""
    folder = Path(folder)
    if kills:
        _kill_later(folder, kills, longest)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist
    from sharded_models import linear_model, shard, share
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.functional import dropout, mse_loss
    from torch.nn.parallel import DistributedDataParallel

    import dynsparse as ds
    from dynsparse.ranks import digest

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A store for each start: in the agent's, addresses of the dead are found.
    start = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    store = dist.FileStore(str(folder / f"store-{start}"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=6)
    )
    torch.manual_seed(100 + rank)
    model = linear_model()
    if kind == "fsdp":
        forward = shard(model, init_device_mesh("cpu", (size,)))
    else:
        forward = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = ds.training.ConstantSchedule(10**6, update_interval=3, drop_fraction=0.2)
    trainer = ds.RigL(model, optimizer, schedule=schedule)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    path = folder / "checkpoint"
    if path.exists():
        ds.training.load_checkpoint(path, **parts)
    saving = None
    while trainer.steps < STEPS:
        x, y = share(trainer.steps, rank, size)
        optimizer.zero_grad()
        mse_loss(forward(dropout(x, 0.1)), y).backward()  # with random numbers of each rank
        trainer.step()
        if trainer.steps % 2 == 0:
            saving = ds.training.save_checkpoint(path, **parts, wait=wait)
    if saving is not None:
        saving.wait()
    state = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in model.state_dict().items()}
    found = digest(*(f"{name}" for name in state), *state.values())
    (folder / f"digest-{rank}").write_text(str(found))
    dist.barrier()
    dist.destroy_process_group()


def _kill_later(folder, kills, longest):
    """Kill one of the ranks at a random moment, at most `kills` times per training."""
    chance = random.SystemRandom()
    if chance.random() > 1.5 / int(os.environ["WORLD_SIZE"]):
        return

    def die():
        time.sleep(chance.uniform(0, longest))
        line = os.open(folder / "kills", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if os.fstat(line).st_size < kills:
            os.write(line, b"x")
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def run(kind, size, kills, *, longest=1.2, wait=True):
    """Run a training under the elastic agent; return (digests of the ranks, kills)."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        # The agent itself fails where a rank dies while it writes what it died of: whoever started
        # it starts it again.
        while not all((Path(folder) / f"digest-{rank}").exists() for rank in range(size)):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=size,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                run_id=f"kills-{random.randrange(2**30)}",
                max_restarts=kills + AGAIN,
                monitor_interval=0.05,
                start_method="forkserver",
            )
            with contextlib.suppress(EOFError):
                elastic_launch(config, train)(folder, kind, kills, longest, wait)
        digests = [(Path(folder) / f"digest-{rank}").read_text() for rank in range(size)]
        line = Path(folder) / "kills"
        return digests, line.stat().st_size if line.exists() else 0


def _logged(log):
    """Read the lines of earlier trainings from the log; skip a truncated line."""
    if log is None or not log.exists():
        return []
    lines = log.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=300)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--each", type=int, default=10, help="kills of one training")
    arguments.add_argument("--seconds", type=float, default=1e9)
    arguments.add_argument("--log", type=Path, help="a line of JSON for each training is added")
    options = arguments.parse_args()
    ways = [(k, n, w) for n in options.ranks for k in ("ddp", "fsdp") for w in (True, False)]
    expected: dict[tuple[str, int], list[str]] = {}
    before = _logged(options.log)
    trainings = len(before)
    killed = sum(line["kills"] for line in before)
    right = sum(line["kills"] for line in before if line["same bits"])
    began = time.monotonic()
    while killed < options.kills and time.monotonic() - began < options.seconds:
        kind, size, wait = ways[trainings % len(ways)]
        if (kind, size) not in expected:
            expected[kind, size], _ = run(kind, size, 0)
        found, kills = run(kind, size, min(options.each, options.kills - killed), wait=wait)
        trainings += 1
        killed += kills
        same = found == expected[kind, size] and len(set(found)) == 1
        right += kills if same else 0
        now = {"kind": kind, "ranks": size, "wait": wait, "kills": kills, "same bits": same}
        told = {"kills so far": killed, "right": right, "seconds": round(time.monotonic() - began)}
        line = json.dumps(now | told)
        print(line, flush=True)
        if options.log is not None:
            with options.log.open("a") as log:
                log.write(f"{line}\n")
    sys.exit(0 if right == killed else 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
