"""The cost model that chooses kernels on a CPU: its formula and its constants.

It predicts nanoseconds on one thread; all kinds scale about equally with threads, so the choice
does not depend on their number. `benchmarks/kernel_choice.py` measures how far the choice is from
the best one. The mean error of a time is 10 to 25 %. Only the order of the kinds matters; it
depends on the processor through its caches and the width of its arithmetic. The library comes with
tables for the processors measured so far and estimates for the others.
`dynsparse tune` measures this processor and stores the constants in the cache folder.

The table is fixed at the first choice of a kernel and stays for the life of the process: another
kernel may sum in another order, and a training must not switch kernels. With several ranks the
supplied tables are used, since measured ones would differ from rank to rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from functools import cache
from math import log2
from pathlib import Path
from typing import NamedTuple

import torch

from dynsparse._core import native
from dynsparse._core.checks import is_number
from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse._core.files.folders import cache_folder
from dynsparse._core.files.limits import parse_json
from dynsparse._core.processor import processor
from dynsparse._core.version import __version__

_log = logging.getLogger(__name__)


class Layer(NamedTuple):
    """The sizes of a layer that costs depend on; nnz counts blocks."""

    out_features: int
    in_features: int
    nnz: int
    block_size: int


class Cost(NamedTuple):
    """Nanoseconds of one pass: call + feature * (in + out) * batch + entries * (entry
    + sample * max(batch, least_batch)) + far * non-zeros * log2(1 + megabytes of values).

    `entries` are the non-zeros for kernels that read only these, and all elements of the matrix for
    `dense` and for bit masks. `far` is the extra cost of values that are not in the second-level
    cache.
    """

    call: float
    feature: float
    entry: float
    sample: float
    least_batch: int
    far: float


# Family -> costs of forward and of backward (both gradients).
Costs = dict[str, tuple[Cost, Cost]]

FAMILIES = (
    "sparse elements",
    "sparse blocks",  # block sizes that are not multiples of 16
    "sparse blocks of 16",  # 16, 32, 64 and so on
    "small elements",
    "small blocks",
    "dense",
)


class Table(NamedTuple):
    """Constants and their origin.

    Attributes:
        name: the processors that the table is for.
        origin: where it was measured, or what it was estimated from.
        costs: a `Cost` for each of `FAMILIES`, forward and backward.
        measured_here: whether this processor was measured.
    """

    name: str
    origin: str
    costs: Costs
    measured_here: bool = False


def family(kind: str, block_size: int) -> str:
    """Return the family of kernels, which shares constants, of this kind and block size."""
    if kind == "dense":
        return kind
    if block_size == 1:
        return f"{kind} elements"
    return "sparse blocks of 16" if kind == "sparse" and block_size % 16 == 0 else f"{kind} blocks"


def evaluate(c: Cost, name: str, layer: Layer, batch: int) -> float:
    """Return the nanoseconds of `Cost` for kernels of the family `name`."""
    elements = layer.out_features * layer.in_features
    values = layer.nnz * layer.block_size**2
    entries = elements if name in ("small elements", "dense") else values
    return (
        c.call
        + c.feature * (layer.out_features + layer.in_features) * batch
        + entries * (c.entry + c.sample * max(batch, c.least_batch))
        + c.far * values * log2(1 + values / (1 << 18))
    )


# The supplied tables.

_GRID = "layers of 256 to 4096 features, batches of 1 to 2048, densities of 0.01 to 1"

_XEON: Costs = {
    "sparse elements": (
        Cost(6651, 0.1763, 0.2364, 0.0352, 16, 0.0409),
        Cost(10421, 0.4319, 1.7207, 0.0485, 16, 0.7905),
    ),
    "sparse blocks": (
        Cost(7127, 0.2058, 0.1038, 0.0138, 16, 0.0589),
        Cost(10073, 0.4713, 1.6136, 0.0376, 16, 0.208),
    ),
    "sparse blocks of 16": (
        Cost(7639, 0.1948, 0.1297, 0.0168, 4, 0.1997),
        Cost(10974, 0.2492, 0.0, 0.0328, 4, 0.1854),
    ),
    "small elements": (
        Cost(6973, 0.1358, 0.0278, 0.0242, 2, 0.0316),
        Cost(9591, 0.5226, 0.1626, 0.0386, 0, 0.1961),
    ),
    "small blocks": (
        Cost(7195, 1.4029, 0.0, 0.027, 2, 0.0539),
        Cost(9148, 4.115, 0.0065, 0.0532, 2, 0.1557),
    ),
    "dense": (
        Cost(20418, 0.0949, 0.3828, 0.0154, 0, 0.1399),
        Cost(38881, 0.2102, 0.5919, 0.0286, 0, 0.4488),
    ),
}

_EPYC: Costs = {
    "sparse elements": (
        Cost(7922, 0.122, 0.0058, 0.0395, 16, 0.1528),
        Cost(12254, 0.3972, 1.0344, 0.0541, 16, 0.8155),
    ),
    "sparse blocks": (
        Cost(6905, 0.1867, 0.0, 0.0204, 16, 0.0501),
        Cost(9710, 0.4114, 0.9547, 0.0467, 16, 0.3134),
    ),
    "sparse blocks of 16": (
        Cost(7382, 0.1462, 0.0847, 0.0217, 4, 0.0824),
        Cost(9980, 0.1611, 0.0, 0.0465, 2, 0.1128),
    ),
    "small elements": (
        Cost(6871, 0.1016, 0.0046, 0.0279, 2, 0.0281),
        Cost(9182, 0.4426, 0.1289, 0.045, 0, 0.2007),
    ),
    "small blocks": (
        Cost(5793, 1.2219, 0.0, 0.0271, 0, 0.0296),
        Cost(7625, 1.776, 0.0, 0.0675, 0, 0.0939),
    ),
    "dense": (
        Cost(15749, 0.135, 0.2228, 0.0245, 0, 0.1608),
        Cost(27877, 0.2079, 0.4005, 0.0501, 0, 0.6022),
    ),
}
_EPYC_ZEN_3: Costs = {
    "sparse elements": (
        Cost(11610, 0.2817, 0.0, 0.05028, 16, 0.0),
        Cost(17921, 0.5209, 0.2144, 0.09367, 16, 1.1925),
    ),
    "sparse blocks": (
        Cost(11014, 0.3367, 0.0, 0.02972, 16, 0.031893),
        Cost(12944, 0.5846, 0.6805, 0.07509, 16, 0.28389),
    ),
    "sparse blocks of 16": (
        Cost(11914, 0.2994, 0.1977, 0.03078, 4, 0.21904),
        Cost(13706, 0.4523, 0.1191, 0.05401, 2, 0.18056),
    ),
    "small elements": (
        Cost(11594, 0.1714, 0.007747, 0.04708, 2, 0.047374),
        Cost(15494, 0.7469, 0.2175, 0.07598, 0, 0.33867),
    ),
    "small blocks": (
        Cost(9753, 1.325, 0.0, 0.04293, 0, 0.05935),
        Cost(11855, 1.856, 0.157, 0.08816, 0, 0.061995),
    ),
    "dense": (
        Cost(42490, 0.0, 0.271, 0.03071, 0, 0.51477),
        Cost(74615, 0.0, 0.4138, 0.05697, 0, 0.82686),
    ),
}
_EPYC_ZEN_5: Costs = {
    "sparse elements": (
        Cost(4444, 0.0973, 0.0834, 0.0196, 16, 0.1576),
        Cost(7711, 0.158, 0.6661, 0.024, 16, 0.3938),
    ),
    "sparse blocks": (
        Cost(4833, 0.0906, 0.054, 0.0092, 16, 0.0853),
        Cost(6511, 0.2138, 0.6691, 0.0194, 16, 0.0953),
    ),
    "sparse blocks of 16": (
        Cost(4710, 0.1003, 0.0655, 0.0101, 4, 0.0896),
        Cost(6510, 0.2046, 0.028, 0.0174, 2, 0.0895),
    ),
    "small elements": (
        Cost(3931, 0.0, 0.0, 0.0168, 2, 0.0431),
        Cost(6632, 0.0, 0.078, 0.0208, 0, 0.1118),
    ),
    "small blocks": (
        Cost(4596, 0.3948, 0.0, 0.0191, 0, 0.0247),
        Cost(6028, 1.1267, 0.0374, 0.0443, 0, 0.036),
    ),
    "dense": (
        Cost(9292, 0.0, 0.0992, 0.0198, 0, 0.1418),
        Cost(17832, 0.0, 0.1456, 0.0399, 0, 0.2583),
    ),
}


def _multiply(costs: Costs, sparse: float, dense: float) -> Costs:
    """Scale the time of a multiply-add of sparse and of dense kernels."""
    return {
        name: (
            forward._replace(sample=forward.sample * (dense if name == "dense" else sparse)),
            backward._replace(sample=backward.sample * (dense if name == "dense" else sparse)),
        )
        for name, (forward, backward) in costs.items()
    }


_AMX = Table(
    "Intel with AMX",
    f"measured on one thread of a two-core Xeon with AVX-512 (family 6, model 207): {_GRID}",
    _XEON,
)
_ZEN_4 = Table(
    "AMD Zen 4",
    f"measured on one thread of a two-core EPYC with AVX-512 (family 25, model 17): {_GRID}",
    _EPYC,
)
_AVX512 = Table(
    "Intel with AVX-512",
    f"estimated: as {_AMX.name}, which products of float32 do not use",
    _XEON,
)
_AVX2 = Table(
    "Intel with AVX2",
    f"estimated: as {_AMX.name}, with vectors of half the width, and half the multiply-adds and "
    "loads a cycle",
    _multiply(_XEON, 2, 2),
)
_ZEN_3 = Table(
    "AMD up to Zen 3",
    "measured on a two-core EPYC with AVX2 (family 25, model 1), by `dynsparse tune`",
    _EPYC_ZEN_3,
)
_ZEN_5 = Table(
    "AMD from Zen 5",
    "measured on a two-core EPYC with AVX-512 (family 26, model 2), by `dynsparse tune`",
    _EPYC_ZEN_5,
)
_ARM = Table(
    "ARM",
    f"estimated: as {_ZEN_4.name}, with as many multiply-adds a cycle (four of 128 bits), but "
    "three loads of 128 bits where that has one of 512: sparse kernels wait for a load with each "
    "multiply-add, dense products use theirs again",
    _multiply(_EPYC, 4 / 3, 1),
)
TABLES = (_AMX, _AVX512, _AVX2, _ZEN_3, _ZEN_4, _ZEN_5, _ARM)


def default_table() -> Table:
    """Return the supplied table for this machine; unknown makers use Intel's."""
    if "neon" in native.supported_isas():
        return _ARM
    machine = processor()
    wide = "avx512f" in machine.flags
    if machine.maker == "AuthenticAMD":
        return (_ZEN_5 if machine.family > 25 else _ZEN_4) if wide else _ZEN_3
    if "amx_tile" in machine.flags:
        return _AMX
    return _AVX512 if wide else _AVX2


# The table in use.

_active: Table | None = None


def active_table() -> Table:
    """Return the table in use, which the first call chooses.

    It is the stored measurement if that is enabled, otherwise the supplied table.
    """
    global _active
    if _active is None:
        measurement = None if _has_other_ranks() else load_measurement()
        if measurement is None or not measurement.enabled:
            _active = default_table()
        else:
            _active = measurement.table()
        _log.info("kernels are chosen by the table %s: %s", _active.name, _active.origin)
    return _active


def _has_other_ranks() -> bool:
    if os.environ.get("WORLD_SIZE", "1").strip() not in ("", "0", "1"):
        return True
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


# The choice.

# Below this density bit masks would take more than half the memory of the values, and laying out
# the dense weight does not pay either.
LEAST_DENSITY = 1 / 16

# The blocks that the kernels for small batches support, and the largest batch they were measured
# with.
SMALL_BLOCKS = (1, 4, 8, 16, 32, 64, 128)
MOST_SAMPLES = 128

# Blocks that the processor's bfloat16 units multiply.
_UNIT_BLOCKS = (16, 32, 64, 128)


def _cost(costs: Costs, kind: str, layer: Layer, batch: int, backward: bool) -> float:
    name = family(kind, layer.block_size)
    return evaluate(costs[name][backward], name, layer, batch)


def cheapest_kind(costs: Costs, layer: Layer, batch: int, backward: bool) -> str:
    """Return the candidate of least predicted cost."""
    kinds = candidate_kinds(layer, batch)
    return min(kinds, key=lambda kind: _cost(costs, kind, layer, batch, backward))


def candidate_kinds(layer: Layer, batch: int) -> list[str]:
    """Return the kinds that the cost model considers for this layer on a CPU."""
    kinds = ["sparse"]
    density = layer.nnz * layer.block_size**2 / max(1, layer.out_features * layer.in_features)
    small_fits = layer.block_size in SMALL_BLOCKS
    if layer.block_size == 1:
        # Instruction sets that do not expand masks read them bit by bit.
        small_fits = density >= LEAST_DENSITY and native.expands_masks()
    if small_fits and batch <= MOST_SAMPLES:
        kinds.append("small")
    if density >= LEAST_DENSITY:
        kinds.append("dense")
    return kinds


def is_full(layer: Layer) -> bool:
    """Whether every element is present, so that the values are the dense weight."""
    return layer.block_size == 1 and layer.nnz == layer.out_features * layer.in_features


def choose(layer: Layer, batch: int, backward: bool, dtype: torch.dtype = torch.float32) -> str:
    """Return the fastest kind for activations of `dtype` on a CPU with compiled kernels."""
    low = dtype is torch.bfloat16
    # The bfloat16 units beat float32 at every density.
    if low and layer.block_size in _UNIT_BLOCKS and native.bfloat16_unit() != "float32":
        return "bfloat16"
    if is_full(layer):
        return "dense"
    kind = "sparse" if batch == 0 else cheapest_kind(active_table().costs, layer, batch, backward)
    return "bfloat16" if low and kind == "sparse" else kind


def speedup(layer: Layer, batch: int) -> float:
    """Return the predicted time of a dense layer over that of the fastest kinds.

    For forward and both gradients of float32, on a CPU with compiled kernels.
    """
    costs = active_table().costs
    dense = fastest = 0.0
    for backward in (False, True):
        # Without the time to lay the weight out, which a dense layer has already.
        cost = costs["dense"][backward]._replace(entry=0.0, far=0.0)
        dense += evaluate(cost, "dense", layer, batch)
        fastest += _cost(costs, choose(layer, batch, backward), layer, batch, backward)
    return dense / fastest


# Measurements, in files of the cache folder.


@dataclass(frozen=True)
class Measurement:
    """The result of measuring this processor.

    Attributes:
        date: the day of the measurement, such as 2026-01-31.
        costs: the fitted constants.
        error: mean relative error of a predicted time.
        excess: how much longer the kinds that a table chooses take than the best kinds, on average
            over the measured cells: {"default": .., "measured": ..}.
        enabled: whether kernels are chosen by these constants.
        reason: why, or why not.
    """

    date: str
    costs: Costs
    error: float
    excess: dict[str, float]
    enabled: bool
    reason: str

    def table(self) -> Table:
        return Table(
            processor().name, f"measured here on {self.date}", self.costs, measured_here=True
        )


@cache
def _kernels_digest() -> str:
    """Return a hash of the compiled kernels; empty if there are none."""
    library = native.load()
    if library is None:
        return ""
    return hashlib.sha256(Path(library._name).read_bytes()).hexdigest()


def environment() -> dict[str, str]:
    """Return what measured constants depend on: processor, kernels, and versions.

    torch is among them because its dense products are one of the kinds.
    """
    return {
        "processor": processor().name,
        "kernels": _kernels_digest(),
        "version": __version__,
        "torch": str(torch.__version__),
    }


def _measurement_file() -> Path:
    name = hashlib.sha256(json.dumps(environment(), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "kernel-costs" / f"{name[:32]}.json"


def load_measurement() -> Measurement | None:
    """Return the stored measurement of this processor; None if there is none or it is invalid."""
    if not _kernels_digest():
        return None
    try:
        content = _measurement_file().read_bytes()
    except OSError:
        return None
    costs: Costs = {}
    try:
        fields = parse_json(content)
        for name in FAMILIES:
            forward, backward = (Cost(*numbers) for numbers in fields["costs"][name])
            if not all(map(is_number, (*forward, *backward))):
                raise TypeError(f"the costs of {name!r} must be numbers")
            costs[name] = forward, backward
        return Measurement(**{**fields, "costs": costs})
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("the stored kernel costs cannot be read and are ignored: %s", error)
        return None


def save_measurement(measurement: Measurement) -> None:
    """Store a measurement for later processes.

    Raises:
        OSError: the file cannot be written.
    """
    file = _measurement_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(file, json.dumps(vars(measurement), allow_nan=False))


def delete_measurement() -> bool:
    """Delete the stored measurement; return whether there was one."""
    try:
        _measurement_file().unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
