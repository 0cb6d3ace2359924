"""Run a function in several processes that form a gloo group."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch

# Imported once, in a server that processes are forked from: a fresh import takes seconds.
PRELOADED = [
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.checkpoint", "torch.nn.parallel",
    "torch._dynamo",  # fully_shard imports it
    "dynsparse", "dynsparse.training",
]  # fmt: skip


def on_ranks(size, work, *arguments, seconds=300):
    """Return [work(rank, size, *arguments) for every rank], each rank in its own process.

    Args:
        work: a function of a module in this folder.
        seconds: time limit; processes still running then are killed and the test fails. The
            timeout of the group's collectives is a tenth of it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = (folder, seconds / 10, work, arguments)
        codes, late = _start_and_join(size, _run, given, seconds, daemon=True)
        errors = sorted(folder.glob("error-*"), key=lambda file: file.stat().st_mtime_ns)
        if errors:
            raise AssertionError(f"{errors[0].name}:\n{errors[0].read_text()}")
        assert not late, f"ranks {late} were still running after {seconds} s"
        assert codes == [0] * size, f"exit codes {codes}"
        return [torch.load(folder / f"result-{rank}", weights_only=True) for rank in range(size)]


def run_to_failure(size, work, *arguments, seconds=300, wait=100):
    """Run work(rank, size, *arguments) on every rank and report how each process ends.

    Returns:
        One dict per rank: `code`, the exit code; `line`, the exception it raised, or ""; `log`, its
        messages to the logger "dynsparse". A killed process has only its exit code.

    Args:
        wait: timeout of the group's collectives, in seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes, late = _start_and_join(
            size, _report_outcome, (folder, wait, work, arguments), seconds
        )
        assert not late, f"ranks {late} were still running after {seconds} s"
        found = []
        for rank, code in enumerate(codes):
            file = folder / f"end-{rank}"
            told = json.loads(file.read_text()) if file.exists() else {}
            found.append({"code": code, "line": "", "log": []} | told)
        return found


def _start_and_join(size, target, arguments, seconds, daemon=False):
    """Run target(rank, size, *arguments) in a process per rank.

    Processes still running after `seconds` are killed.

    Returns:
        (exit codes, ranks that exceeded the limit).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [
        context.Process(target=target, args=(rank, size, *arguments), daemon=daemon)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes], late


def _report_outcome(rank, size, folder, wait, work, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    log = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("dynsparse").addHandler(handler)
    store = torch.distributed.FileStore(str(folder / "store"), size)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=wait)
    )
    line, code = "", 0
    try:
        work(rank, size, *arguments)
        torch.distributed.destroy_process_group()
    except Exception as error:
        line, code = f"{type(error).__name__}: {error}", 1
    (folder / f"end-{rank}").write_text(json.dumps({"line": line, "log": log}))
    sys.exit(code)


def _run(rank, size, folder, wait, work, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    store = torch.distributed.FileStore(str(folder / "store"), size)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=wait)
    )
    try:
        torch.save(work(rank, size, *arguments), folder / f"result-{rank}")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
