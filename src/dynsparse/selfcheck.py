"""The comparisons of `dynsparse check`: whether this installation computes correctly here.

Forward and both gradients of a layer, by the kernels of each instruction set, by plain torch and on
each GPU, are compared with the plain loops of `ops.linear.naive` in float64.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse._core.checks import check_integer, check_types
from dynsparse.ops.linear import linear, naive
from dynsparse.ops.linear.products import use_kernel
from dynsparse.pattern import SparsePattern

__all__ = ["Check", "Result", "run_checks"]

PASSES = ("forward", "gradient of the input", "gradient of the weights")
_BLOCKS = (1, 16)
# Tolerances of errors relative to sums of magnitudes. GPUs may multiply float32 in TF32.
_TOLERANCE, _ON_GPU = 3e-6, 2e-3


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        where: the instruction set or device; "none" is plain torch.
        name: the pass; "library" if the kernels could not be loaded.
        error: the largest difference, relative to the size of what is compared.
        tolerance: the largest error that rounding explains.
        message: the message of an error that was raised.
    """

    where: str
    name: str
    error: float
    tolerance: float
    message: str = ""

    @property
    def matches(self) -> bool:
        return not self.message and self.error <= self.tolerance

    def words(self) -> str:
        """Return the difference in one line."""
        if self.message:
            return f"{self.where}, {self.name}: {self.message}"
        return (
            f"{self.where}, {self.name}: differs by {self.error:.3g}, where rounding explains "
            f"{self.tolerance:.3g}"
        )


@dataclass(frozen=True)
class Result:
    """All comparisons.

    Attributes:
        seed: the seed of all random shapes and numbers.
    """

    seed: int
    checks: list[Check]

    @property
    def differing(self) -> list[Check]:
        return [check for check in self.checks if not check.matches]

    @property
    def matches(self) -> bool:
        return not self.differing

    def plain(self) -> dict[str, Any]:
        """Return the result in plain types, for JSON."""
        return {
            "match": self.matches,
            "seed": self.seed,
            "checks": [
                {**asdict(check), "match": check.matches}
                | ({} if check.error < 1e300 else {"error": None})
                for check in self.checks
            ],
        }


@check_types
def run_checks(
    seed: int | None = None, tell: Callable[[str, list[Check]], object] | None = None
) -> Result:
    """Compare the products of sparse layers with float64.

    It checks the kernels of every instruction set that this processor runs and this installation
    has, plain torch, and all GPUs that torch finds. An error that one raises is its result.

    Args:
        seed: the seed of all random shapes and numbers; random by default.
        tell: called with an instruction set or device and its checks when these are made.

    Raises:
        ValueError: a seed that is not an integer in [0, 2^63).

    >>> from dynsparse.selfcheck import run_checks
    >>> run_checks(0).matches
    True
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    seed = check_integer("seed", seed, 0)
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2^63, got {seed}")
    result = Result(seed, [])
    generator = torch.Generator().manual_seed(seed)

    def add(where: str, checks: Iterator[Check]) -> None:
        made = list(checks)
        result.checks.extend(made)
        if tell is not None:
            tell(where, made)

    for isa in (*native.describe()["available"], "none"):
        add(isa, _check_isa(isa, generator))
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        add(str(device), _check_passes(str(device), device, _ON_GPU, generator))
    return result


def _check_isa(isa: str, generator: torch.Generator) -> Iterator[Check]:
    if isa != "none":
        loaded = _run_check(isa, "library", 0.0, lambda: 0.0 * bool(native.load_isa(isa)))
        if not loaded.matches:
            yield loaded
            return
    with native.use_isa(isa), use_kernel("sparse"):
        yield from _check_passes(isa, torch.device("cpu"), _TOLERANCE, generator)


def _check_passes(
    where: str, device: torch.device, tolerance: float, generator: torch.Generator
) -> Iterator[Check]:
    for name in PASSES:
        compare = functools.partial(_error, name, device, generator)
        yield _run_check(where, name, tolerance, compare)


def _error(name: str, device: torch.device, generator: torch.Generator) -> float:
    """Return the larger error of one pass over elements and over blocks."""
    return max(_error_of_block(name, block, device, generator) for block in _BLOCKS)


def _error_of_block(
    name: str, block: int, device: torch.device, generator: torch.Generator
) -> float:
    def draw_integer(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator, device="cpu"))

    rows, cols = (draw_integer(1, 320 // block) for _ in range(2))
    pattern = SparsePattern.random(
        (rows * block, cols * block),
        nnz=draw_integer(1, rows * cols),
        block_size=block,
        generator=generator,
    )
    batch = draw_integer(1, 200)
    x = torch.randn(batch, cols * block, generator=generator, device="cpu")
    dy = torch.randn(batch, rows * block, generator=generator, device="cpu")
    values = torch.randn(pattern.values_shape, generator=generator, device="cpu")
    inputs = [t.to(device, copy=True).requires_grad_() for t in (x, values)]
    y = linear(inputs[0], inputs[1], pattern)
    y.backward(dy.to(device))
    results = dict(zip(PASSES, (y.detach(), inputs[0].grad, inputs[1].grad), strict=True))
    exact = [t.double() for t in (x, dy, values)]
    expected, size = (
        _reference(name, pattern, *tensors) for tensors in (exact, [t.abs() for t in exact])
    )
    return distance(results[name], expected, size)


def _reference(name: str, pattern: SparsePattern, x: Tensor, dy: Tensor, values: Tensor) -> Tensor:
    if name == PASSES[0]:
        return naive.forward(x, values, pattern.index, None)
    if name == PASSES[1]:
        return naive.grad_input(dy, values, pattern.index)
    return naive.grad_weight(dy, x, values, pattern.index)


def _run_check(where: str, name: str, tolerance: float, compare: Callable[[], float]) -> Check:
    """Run `compare`, which returns the error; an exception becomes the result of the check."""
    try:
        error = float(compare())
    except Exception as raised:  # a broken installation raises errors of any kind
        message = " ".join(f"{type(raised).__name__}: {raised}".split())
        return Check(where, name, float("inf"), tolerance, message[:300])
    return Check(where, name, error if error == error else float("inf"), tolerance)


def distance(got: Tensor | None, expected: Tensor, size: Tensor) -> float:
    """Return the largest |got - expected| over the largest of `size`; infinity if shapes differ.

    Args:
        expected: float64.
        size: sums of magnitudes, to which errors are relative.
    """
    if got is None or got.shape != expected.shape:
        return float("inf")
    error = float((got.double().cpu() - expected).abs().max())
    scale = float(size.max())
    return error / scale if scale else error
