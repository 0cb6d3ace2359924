"""The constants of costs that come with the library, by machine: a start, where none was measured.

`benchmarks/kernel_choice.py` measured two machines and fitted them; what is estimated says from
what. `dynsparse tune` measures this machine.
"""

from __future__ import annotations

from dynsparse import native
from dynsparse.ops.linear.costs import Cost, Costs, Table
from dynsparse.processor import processor

_GRID = "layers of 256 to 4096 features, batches of 1 to 2048, densities of 0.01 to 1"

_XEON: Costs = {
    "sparse elements": (
        Cost(6666, 0.1739, 0.1514, 0.0338, 16, 0.0877),
        Cost(10082, 0.445, 1.4113, 0.0508, 16, 1.3183),
    ),
    "sparse blocks": (
        Cost(5816, 0.196, 0.0737, 0.0157, 16, 0.0087),
        Cost(7169, 0.4568, 1.7683, 0.0421, 16, 0.0427),
    ),
    "sparse blocks of 16": (
        Cost(7448, 0.1524, 0.1146, 0.0189, 4, 0.1834),
        Cost(9860, 0.2993, 0.006, 0.0357, 4, 0.1375),
    ),
    "small elements": (
        Cost(6725, 0.2173, 0.0049, 0.0224, 2, 0.0491),
        Cost(8950, 0.6643, 0.1406, 0.0368, 0, 0.1597),
    ),
    "small blocks": (
        Cost(5624, 1.4935, 0.0, 0.0235, 2, 0.0389),
        Cost(6833, 3.1534, 0.0, 0.0656, 2, 0.105),
    ),
    "dense": (
        Cost(11157, 0.1748, 0.2672, 0.0158, 0, 0.1866),
        Cost(21483, 0.2304, 0.4351, 0.03, 0, 0.3647),
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


def _multiplied(costs: Costs, sparse: float, dense: float) -> Costs:
    """With other times of a multiply-add."""
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
    _multiplied(_XEON, 2, 2),
)
_ZEN_3 = Table(
    "AMD up to Zen 3",
    f"estimated: as {_ZEN_4.name}, whose vectors of 512 bits take two cycles where those of 256 "
    "take one",
    _EPYC,
)
_ZEN_5 = Table(
    "AMD from Zen 5",
    f"estimated: as {_ZEN_4.name}, with twice the multiply-adds and loads a cycle",
    _multiplied(_EPYC, 0.5, 0.5),
)
_ARM = Table(
    "ARM",
    f"estimated: as {_ZEN_4.name}, with as many multiply-adds a cycle (four of 128 bits), but "
    "three loads of 128 bits where that has one of 512: sparse kernels wait for a load with each "
    "multiply-add, dense products use theirs again",
    _multiplied(_EPYC, 4 / 3, 1),
)
TABLES = (_AMX, _AVX512, _AVX2, _ZEN_3, _ZEN_4, _ZEN_5, _ARM)


def shipped() -> Table:
    """The table for this machine; those of other makers count as Intel's."""
    if "neon" in native.supported_isas():
        return _ARM
    here = processor()
    wide = "avx512f" in here.flags
    if here.maker == "AuthenticAMD":
        return (_ZEN_5 if here.family > 25 else _ZEN_4) if wide else _ZEN_3
    if "amx_tile" in here.flags:
        return _AMX
    return _AVX512 if wide else _AVX2
