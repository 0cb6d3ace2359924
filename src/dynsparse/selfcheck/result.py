"""What a check found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Check", "Result", "Speed", "checked", "distance"]


@dataclass(frozen=True)
class Check:
    """One thing that was compared.

    Attributes:
        part: "kernels", "threads", "gpu" or "tile machine".
        where: the instruction set, the device or the machine it was computed on.
        name: what was computed.
        error: the largest difference found, over the size of what is compared.
        tolerance: the largest that rounding explains.
        said: of an error that was raised instead of a result, its words.
    """

    part: str
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


@dataclass(frozen=True)
class Speed:
    """What was reached, the best of some runs: `value` in `unit` with so many threads."""

    where: str
    name: str
    threads: int
    value: float
    unit: str


@dataclass
class Result:
    """All that was found.

    Attributes:
        seed: of all random shapes and numbers; the same seed checks the same.
    """

    seed: int
    checks: list[Check] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

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
            "speeds": [asdict(speed) for speed in self.speeds],
        }


def checked(
    part: str, where: str, name: str, tolerance: float, compare: Callable[[], float]
) -> Check:
    """The check that `compare`, which returns the error, makes; what it raises is its result."""
    try:
        error = float(compare())
    except Exception as raised:  # of any kind: that is what a broken installation does
        said = " ".join(f"{type(raised).__name__}: {raised}".split())
        return Check(part, where, name, float("inf"), tolerance, said[:300])
    return Check(part, where, name, error if error == error else float("inf"), tolerance)


def distance(got: Tensor, expected: Tensor, size: Tensor) -> float:
    """The largest |got - expected| over the largest of `size`; infinite where it is NaN.

    Args:
        got, expected: of one shape, the latter float64.
        size: sums of magnitudes, of which rounding errors are shares.
    """
    if got.shape != expected.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    error = float((got.double().cpu() - expected).abs().max())
    scale = float(size.max())
    return error / scale if scale else error
