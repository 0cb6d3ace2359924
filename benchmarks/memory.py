"""Peak memory of one large sparse layer in training, pattern update included, and its parts.

    python benchmarks/memory.py [--size 16384] [--density 0.01] [--batch 256] [--method rigl]

Each measurement runs in a fresh process: how far the peak resident memory (VmHWM) rises above the
resident memory after all imports and the training of a tiny layer. Linux only. For comparison it
prints the size of a dense float32 weight, of which dense training holds four (weight, gradient,
two moments of Adam).

The parts are measured after the last backward pass: tensors by purpose, and memory that is released
on request: the kernels' scratch memory, freed memory that the C library keeps, and MKL's buffers.
Memory that was free before and is now used or released reduces "other", even below zero.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dynsparse as ds
from dynsparse._core import native

MB = 1e6
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def resident(field: str) -> int:
    """A field of this process's status, in bytes: VmRSS (current), VmHWM (peak)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def warm_up() -> None:
    """Trigger what torch imports and starts on first use: optimizers, threads, products."""
    layer = ds.nn.SparseLinear(64, 64)
    trainer = ds.RigL(layer, torch.optim.Adam(layer.parameters()), total_steps=4, update_interval=1)
    for _ in range(2):
        layer(torch.randn(8, 64)).square().mean().backward()
        trainer.step()


def alive() -> dict[int, Tensor]:
    """One tensor per storage that is alive in this process, by address."""
    # By type: `isinstance` reads `__class__`, which makes some objects warn.
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


def parts(
    layer: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    activations: list[Tensor],
    before: set[int],
    base: dict[str, int],
) -> dict[str, int]:
    """Bytes of the resident memory beyond `base`, by part; releases what can be released.

    Args:
        activations: x, dY and the gradient of x.
        before: addresses of earlier tensors, not counted.
    """
    whole = resident("VmRSS") - base["VmRSS"]
    named = {
        "values and bias": list(layer.parameters()),
        "gradient": [p.grad for p in layer.parameters() if p.grad is not None],
        "optimizer": [t for state in optimizer.state.values() for t in state.values()],
        "x, dY, gradient of x": activations,
    }
    rest = {address: t for address, t in alive().items() if address not in before}
    found: dict[str, int] = {}
    for name, tensors in named.items():
        own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found[name] = sum(own.values())
        rest = {address: t for address, t in rest.items() if address not in own}
    panels = [t for t in rest.values() if t.dtype is torch.uint8]
    found["panels"] = sum(t.untyped_storage().nbytes() for t in panels)
    others = sum(t.untyped_storage().nbytes() for t in rest.values())
    found["pattern and index"] = others - found["panels"]
    rest.clear()

    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)  # glibc's
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # contains MKL
    products = ctypes.CDLL(str(library)) if library.exists() else None
    mkl = getattr(products, "mkl_serv_free_buffers", lambda: None)

    def kernels() -> None:
        loaded = native.load()
        if loaded is not None:
            loaded.dynsparse_release_scratch()

    for name, release in (
        ("scratch of the kernels", kernels),
        ("freed, kept by the C library", lambda: trim(0)),
        ("kept by MKL", lambda: (mkl(), trim(0))),
    ):
        now = resident("VmRSS")
        release()
        found[name] = max(0, now - resident("VmRSS"))
    found["pages of files"] = resident("RssFile") - base["RssFile"]
    found["other"] = whole - sum(found.values())
    return found


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run a few steps, some with a pattern update; report the peak after each."""
    if args.warm_up:
        warm_up()
    before = set(alive())
    base = {field: resident(field) for field in ("VmRSS", "RssFile")}
    layer = ds.nn.SparseLinear(
        args.size, args.size, density=args.density, block_size=args.block_size
    )
    optimizer = torch.optim.Adam(layer.parameters())
    options: dict[str, Any] = {"total_steps": 100, "update_interval": 2, "drop_fraction": 0.3}
    kinds = {"rigl": ds.RigL, "set": ds.SET}
    if args.method == "static":
        trainer: Any = ds.Static(layer, optimizer)
    else:
        trainer = kinds[args.method](layer, optimizer, **options)
    peaks = {"layer": resident("VmHWM") - base["VmRSS"]}
    x = torch.randn(args.batch, args.size, requires_grad=True)
    dy = torch.randn(args.batch, args.size)
    for step in range(1, 1 + args.steps):
        optimizer.zero_grad()
        x.grad = None
        layer(x).backward(dy)
        updated = trainer.step() is not None
        peaks[f"step {step}{' with update' * updated}"] = resident("VmHWM") - base["VmRSS"]
    layer(x).backward(dy)
    assert x.grad is not None
    peaks["the last backward pass"] = resident("VmHWM") - base["VmRSS"]
    made_of = parts(layer, optimizer, [x, dy, x.grad], before, base)
    return {
        "peaks": peaks,
        "parts": made_of,
        "updates": trainer.updates,
        "nnz": layer.pattern.nnz,
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Properties of the machine and environment that memory may depend on."""
    chosen = re.search(r"\[(\w+)\]", LARGE_PAGES.read_text() if LARGE_PAGES.exists() else "")
    return {
        "threads": torch.get_num_threads(),
        "kernels": native.describe()["isa"],
        "second-level cache": CACHE.read_text().strip() if CACHE.exists() else "unknown",
        "large pages": chosen[1] if chosen else "unknown",
        "C library": " ".join(platform.libc_ver()),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "GLIBC_"))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--block-size", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--method", choices=["rigl", "set", "static"], default="rigl")
    parser.add_argument(
        "--no-warm-up",
        dest="warm_up",
        action="store_false",
        help="also count modules that torch imports with the first optimizer (about 70 MB)",
    )
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(train, (args,))
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    for name, peak in result["peaks"].items():
        print(f"{name:30s} {peak / MB:8.1f} MB at most so far")
    print("after the last backward pass, where the pattern is that of the last update:")
    for name, part in result["parts"].items():
        print(f"  {name:28s} {part / MB:8.1f} MB")
    dense = 4 * args.size**2
    peak = max(result["peaks"].values())
    brief = peak - sum(result["parts"].values())
    print(f"  {'held for less, at the peak':28s} {brief / MB:8.1f} MB")
    print(f"peak growth {peak / MB:.1f} MB; one dense weight alone {dense / MB:.1f} MB")
    if args.json:
        args.json.write_text(json.dumps({**result, "dense_weight": dense, "peak": peak}, indent=1))


if __name__ == "__main__":
    main()
