"""What ranks run on: how fast they compute, and what it costs to send from one to another."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dynsparse.checks import check_integer, check_kind, is_number
from dynsparse.files.json_text import parse_json
from dynsparse.files.whole import write_text_whole
from dynsparse.ops.linear.choice import choose, cost
from dynsparse.ops.linear.costs import Layer
from dynsparse.typed import typed

__all__ = ["Cluster", "Link"]


class Link(NamedTuple):
    """The alpha-beta model of what a message takes: latency + bytes / bandwidth.

    Attributes:
        latency: seconds.
        bandwidth: bytes a second that a rank sends.
    """

    latency: float
    bandwidth: float

    def sum_seconds(self, size: float, ranks: int) -> float:
        """An all-reduce of `size` bytes on each of `ranks`."""
        return 2 * self.gather_seconds(size, ranks)

    def gather_seconds(self, size: float, ranks: int) -> float:
        """An all-gather of a backend that sends and does no more, or half of a sum: `size` bytes
        are there in the end."""
        if ranks == 1:
            return 0.0
        hops = math.ceil(math.log2(ranks))
        return hops * self.latency + (ranks - 1) / ranks * size / self.bandwidth


NEAR = Link(20e-6, 10e9)
"""What is taken for granted where nobody has measured: 20 us, 10 GB/s."""


@dataclass(frozen=True)
class Cluster:
    """Ranks and what lies between them, for `make_plan`. `measure` makes one of a real group.

    Args:
        inner: between ranks of one node.
        outer: between nodes; as `inner` where left out.
        ranks_per_node: consecutive ranks share a node; all of them where left out.
        threads: of a rank that computes on a CPU.
        slowness: how much longer products take than the constants of `ops.linear.costs` say, while
            all ranks compute at once.
        flops: multiplications and additions of non-zeros a second, for ranks that compute on
            something else; threads and slowness are then of no account.
        optimizer: seconds that an optimizer's step takes for one value.
        gathering: how much longer a gather of activations takes than half a sum of them, which
            sends as much: backends add up in place, and copy what they gather.
        copying: seconds that a pass over a byte of activations takes, while all ranks compute.

    Raises:
        ValueError: figures that are not positive.
    """

    inner: Link = NEAR
    outer: Link | None = None
    ranks_per_node: int | None = None
    threads: int = 1
    slowness: float = 1.0
    flops: float | None = None
    optimizer: float = 2e-9
    gathering: float = 1.0
    copying: float = 5e-11

    def __post_init__(self) -> None:
        for name in ("inner", "outer"):
            link = getattr(self, name)
            if link is not None:
                check_kind(name, link, Link, "a Link")
                for part, value in zip(link._fields, link, strict=True):
                    _check_positive(f"{name}.{part}", value)
        for name in ("slowness", "flops", "optimizer", "gathering", "copying"):
            value = getattr(self, name)
            if value is not None:
                _check_positive(name, value)
        check_integer("threads", self.threads, 1)
        if self.ranks_per_node is not None:
            check_integer("ranks_per_node", self.ranks_per_node, 1)

    def link(self, stride: int, size: int) -> Link:
        """Between `size` ranks that are `stride` apart, as those along an axis of a mesh are."""
        near = self.ranks_per_node is None or stride * size <= self.ranks_per_node
        return self.inner if near or self.outer is None else self.outer

    def gather_seconds(self, link: Link, size: float, ranks: int) -> float:
        """A gather of activations: `size` bytes are there in the end."""
        return self.gathering * link.gather_seconds(size, ranks)

    def pass_seconds(self, layer: Layer, batch: int, *, backward: bool) -> float:
        """One pass of a layer over `batch` samples: forward, or both gradients."""
        if self.flops is not None:
            values = layer.nnz * layer.block_size**2
            return (4 if backward else 2) * values * batch / self.flops
        kind = choose(layer, batch, backward)
        return cost(kind, layer, batch, backward) * 1e-9 * self.slowness / self.threads

    def to_dict(self) -> dict[str, Any]:
        """As plain types, for `from_dict`."""
        return dataclasses.asdict(self) | {
            name: None if link is None else link._asdict()
            for name, link in (("inner", self.inner), ("outer", self.outer))
        }

    @classmethod
    @typed
    def from_dict(cls, state: dict) -> Cluster:
        """From what `to_dict` gave.

        Raises:
            ValueError: something else.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        links = {}
        if set(state) <= known:
            links = {name: state[name] for name in ("inner", "outer") if state.get(name)}
        if not links or any(
            not isinstance(link, dict) or set(link) != set(Link._fields) for link in links.values()
        ):
            raise ValueError(
                f"expected figures of a cluster ({', '.join(sorted(known))}; inner and outer with "
                f"{' and '.join(Link._fields)}), got the names {', '.join(map(str, state))}"
            )
        return cls(**(state | {name: Link(**link) for name, link in links.items()}))

    @typed
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figures into a file, as JSON."""
        write_text_whole(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    @typed
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """From a file of `save`.

        Raises:
            ValueError: the file holds something else.
            OSError: it cannot be read.
        """
        try:
            state = parse_json(Path(path).read_bytes())
            if not isinstance(state, dict):
                raise ValueError("expected an object")
            return cls.from_dict(state)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold the figures of a cluster: {error}") from None


def _check_positive(name: str, value: Any) -> None:
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
