"""A server process with all imports done that forks itself for every requested training.

It reads one request per line, JSON, from stdin, and writes one answer to stdout:

- request: {"app": name, "options": {...}, "folder": path, "kind": one of `crash.KINDS`,
  "at": number of the operation or null, "after": seconds until SIGKILL or null,
  "limit": bytes a file may have or null};
- answer: {"status": exit status, negative for a signal, "count": operations on files,
  "error": the error that ended the training, if any}.

Figures are where `--json` says. One thread: a fork of more would hang.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from crash import arm
from rich.console import Console
from sizes import OPTIONS, TEXT

from dynsparse import data
from dynsparse.apps import lm
from dynsparse.apps.image_classification import mnist

APPS = {"mnist": mnist, "lm": lm}
PATHS = ("checkpoint_path", "records_path", "restore", "json", "log", "data")
QUIET = Console(quiet=True)


def options_of(plain: dict[str, Any]) -> dict[str, Any]:
    """Convert the strings of the JSON request to paths where options are paths."""
    return {name: Path(value) if name in PATHS else value for name, value in plain.items()}


def train(request: dict[str, Any], report: int) -> None:
    """Run the training in the child process and report how it ended."""
    options = options_of(request["options"])
    app = APPS[request["app"]]
    if request["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    warnings.simplefilter("ignore" if request["kind"] == "lockless" else "error")
    crash = arm(Path(request["folder"]), request["kind"], request["at"])
    error = None
    try:
        app.run(app.Options(**options), QUIET)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    answer = {"count": crash.count, "error": error}
    os.write(report, json.dumps(answer).encode())


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a training, wait for it or kill it, and return the answer."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            train(request, write)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    if request["after"] is not None:
        time.sleep(request["after"])
        os.kill(child, signal.SIGKILL)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    answer = json.loads(told) if told else {"count": None, "error": None}
    return {"status": os.waitstatus_to_exitcode(status), **answer}


def main() -> None:
    torch.set_num_threads(1)
    # Read once, not in every child: what is under test are the files that a training writes.
    data.load = cache(data.load)
    # What is done once in a process is done before the forks.
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(TEXT)
        for app, options in OPTIONS.items():
            place = {
                "records_path": str(Path(folder, app)),
                "checkpoint_path": str(Path(folder, app)),
            }
            more = {"data": str(text)} if app == "lm" else {}
            APPS[app].run(APPS[app].Options(**options_of({**options, **place, **more})), QUIET)
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
