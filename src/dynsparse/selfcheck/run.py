"""All checks, one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from dynsparse import native
from dynsparse.checks import check_integer
from dynsparse.machine import Target
from dynsparse.selfcheck.gpu import check_gpu
from dynsparse.selfcheck.kernels import check_kernels
from dynsparse.selfcheck.result import Check, Result, Speed
from dynsparse.selfcheck.speeds import measure_speeds
from dynsparse.selfcheck.threads import check_threads, thread_counts
from dynsparse.selfcheck.tiles import check_tiles
from dynsparse.typed import typed

__all__ = ["run_checks"]


@typed
def run_checks(
    seed: int | None = None,
    *,
    speeds: bool = True,
    tell: Callable[[str], object] | None = None,
) -> Result:
    """Compare everything that computes here with float64, and measure the machine.

    The kernels of every instruction set that this processor runs and this installation has, and
    plain torch; all GPUs that torch knows; threads; the memory and the exchange of a simulated Mk2.
    An error of a part is what is wrong with it, and no exception.

    Args:
        seed: of all random shapes and numbers; drawn when left out.
        speeds: whether bandwidth and arithmetic are measured.
        tell: called with a few words before each part.

    Raises:
        ValueError: a seed that is no integer in [0, 2^63).

    >>> from dynsparse.selfcheck import run_checks
    >>> run_checks(0, speeds=False).matches
    True
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    seed = check_integer("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2^63, got {seed}")
    result = Result(seed)
    generator = torch.Generator().manual_seed(seed)
    for words, found in _parts(seed, generator, speeds):
        if tell is not None:
            tell(words)
        for one in found:
            (result.checks if isinstance(one, Check) else result.speeds).append(one)  # type: ignore[arg-type]
    return result


def _parts(
    seed: int, generator: torch.Generator, speeds: bool
) -> Iterator[tuple[str, Iterator[Check | Speed]]]:
    available = native.describe()["available"]
    assert isinstance(available, list)
    for isa in (*available, "none"):
        words = "plain torch" if isa == "none" else f"the kernels for {isa}"
        yield words, check_kernels(isa, generator)
    yield "threads", check_threads(generator)
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    for device in gpus:
        yield str(device), check_gpu(device, generator)
    yield "the tile machine", check_tiles(Target.mk2(), "Mk2", seed)
    if speeds:
        # One thread, and all of them.
        counts = sorted({1, thread_counts()[-1]})
        yield "the processor's speed", measure_speeds(torch.device("cpu"), "cpu", counts)
        for device in gpus:
            yield f"the speed of {device}", measure_speeds(device, str(device), [1])
