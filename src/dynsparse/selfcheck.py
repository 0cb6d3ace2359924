"""Does this installation compute rightly on this machine? What `dynsparse check` does.

Forward and both gradients of a layer, by the kernels of each instruction set, by plain torch and on
each GPU, beside the plain loops of `ops.linear.naive` in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.checks import check_integer
from dynsparse.ops.linear import linear, naive
from dynsparse.ops.linear.choice import use_kernel
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed

__all__ = ["Check", "Result", "run_checks"]

PASSES = ("forward", "gradient of the input", "gradient of the weights")
_BLOCKS = (1, 16)
# Errors over sums of magnitudes: some roundings. GPUs may multiply float32 in TF32.
_TOLERANCE, _ON_GPU = 3e-6, 2e-3


@dataclass(frozen=True)
class Check:
    """One thing that was compared.

    Attributes:
        where: the instruction set or the device it was computed on; "none" is plain torch.
        name: the pass; "library" where the kernels could not be loaded.
        error: the largest difference found, over the size of what is compared.
        tolerance: the largest that rounding explains.
        said: of an error that was raised instead of a result, its words.
    """

    where: str
    name: str
    error: float
    tolerance: float
    said: str = ""

    @property
    def matches(self) -> bool:
        return not self.said and self.error <= self.tolerance

    def words(self) -> str:
        """What differs, in one line."""
        if self.said:
            return f"{self.where}, {self.name}: {self.said}"
        return (
            f"{self.where}, {self.name}: differs by {self.error:.3g}, where rounding explains "
            f"{self.tolerance:.3g}"
        )


@dataclass
class Result:
    """All that was found.

    Attributes:
        seed: of all random shapes and numbers; the same seed checks the same.
    """

    seed: int
    checks: list[Check] = field(default_factory=list)

    @property
    def differing(self) -> list[Check]:
        return [check for check in self.checks if not check.matches]

    @property
    def matches(self) -> bool:
        return not self.differing

    def plain(self) -> dict[str, Any]:
        """Plain types, ready for JSON."""
        return {
            "match": self.matches,
            "seed": self.seed,
            "checks": [
                {**asdict(one), "match": one.matches}
                | ({} if one.error < 1e300 else {"error": None})
                for one in self.checks
            ],
        }


@typed
def run_checks(seed: int | None = None) -> Result:
    """Compare the products of sparse layers with float64, wherever they can be computed here.

    With the kernels of every instruction set that this processor runs and this installation has,
    with plain torch, and on all GPUs that torch knows. An error of one is what is wrong with it,
    and no exception.

    Args:
        seed: of all random shapes and numbers; drawn when left out.

    Raises:
        ValueError: a seed that is no integer in [0, 2^63).

    >>> from dynsparse.selfcheck import run_checks
    >>> run_checks(0).matches
    True
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    seed = check_integer("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2^63, got {seed}")
    result = Result(seed)
    generator = torch.Generator().manual_seed(seed)
    available = native.describe()["available"]
    assert isinstance(available, list)
    for isa in (*available, "none"):
        result.checks += _check_isa(isa, generator)
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        result.checks += _check_passes(str(device), device, _ON_GPU, generator)
    return result


def _check_isa(isa: str, generator: torch.Generator) -> Iterator[Check]:
    if isa != "none":
        loaded = _checked(isa, "library", 0.0, lambda: 0.0 * bool(native.load_isa(isa)))
        if not loaded.matches:
            yield loaded
            return
    with native.use_isa(isa), use_kernel("sparse"):
        yield from _check_passes(isa, torch.device("cpu"), _TOLERANCE, generator)


def _check_passes(
    where: str, device: torch.device, tolerance: float, generator: torch.Generator
) -> Iterator[Check]:
    for name in PASSES:
        yield _checked(where, name, tolerance, lambda name=name: _error(name, device, generator))  # type: ignore[misc]


def _error(name: str, device: torch.device, generator: torch.Generator) -> float:
    """Of one pass over elements and over blocks."""
    return max(_error_of_block(name, block, device, generator) for block in _BLOCKS)


def _error_of_block(
    name: str, block: int, device: torch.device, generator: torch.Generator
) -> float:
    def between(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    rows, cols = (between(1, 320 // block) for _ in range(2))
    pattern = SparsePattern.random(
        (rows * block, cols * block),
        nnz=between(1, rows * cols),
        block_size=block,
        generator=generator,
    )
    batch = between(1, 200)
    x = torch.randn(batch, cols * block, generator=generator)
    dy = torch.randn(batch, rows * block, generator=generator)
    values = torch.randn(pattern.values_shape, generator=generator)
    ours = [t.to(device, copy=True).requires_grad_() for t in (x, values)]
    y = linear(ours[0], ours[1], pattern)
    y.backward(dy.to(device))
    x, dy, values = x.double(), dy.double(), values.double()
    index = pattern.index
    if name == PASSES[0]:
        right, size = (
            naive.forward(a, b, index, None) for a, b in ((x, values), (x.abs(), values.abs()))
        )
        return distance(y.detach(), right, size)
    if name == PASSES[1]:
        right, size = (
            naive.grad_input(a, b, index) for a, b in ((dy, values), (dy.abs(), values.abs()))
        )
        return distance(ours[0].grad, right, size)
    right, size = (
        naive.grad_weight(a, b, values, index) for a, b in ((dy, x), (dy.abs(), x.abs()))
    )
    return distance(ours[1].grad, right, size)


def _checked(where: str, name: str, tolerance: float, compare: Callable[[], float]) -> Check:
    """The check that `compare`, which returns the error, makes; what it raises is its result."""
    try:
        error = float(compare())
    except Exception as raised:  # of any kind: that is what a broken installation does
        said = " ".join(f"{type(raised).__name__}: {raised}".split())
        return Check(where, name, float("inf"), tolerance, said[:300])
    return Check(where, name, error if error == error else float("inf"), tolerance)


def distance(got: Tensor | None, expected: Tensor, size: Tensor) -> float:
    """The largest |got - expected| over the largest of `size`; infinite for another shape.

    Args:
        got, expected: of one shape, the latter float64.
        size: sums of magnitudes, of which rounding errors are shares.
    """
    if got is None or got.shape != expected.shape:
        return float("inf")
    error = float((got.double().cpu() - expected).abs().max())
    scale = float(size.max())
    return error / scale if scale else error
