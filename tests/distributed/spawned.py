"""What the tests share that need real processes: gloo ranks of this machine, soon timed out."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 100


def _run(rank, size, port, work, arguments, folder):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size),
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        torch.save(work(rank, *arguments), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)  # the others learn of it, and do not wait


def spawned(size, work, *arguments):
    """What `work(rank, *arguments)`, a function of a module, returns on each of `size` ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(target=_run, args=(rank, size, port, work, arguments, folder))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(SECONDS)
        finally:
            late = [process for process in processes if process.is_alive()]
            for process in late:
                process.kill()
                process.join()
        told = [file.read_text() for file in sorted(folder.glob("*.txt"))]
        assert not told, "\n".join(told)
        assert not late, f"{len(late)} ranks did not end within {SECONDS} s"
        return [torch.load(folder / f"{rank}.pt") for rank in range(size)]
