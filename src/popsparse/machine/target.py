"""The machine: its constants with their sources, and the targets.

None is fitted to a published benchmark. Sources: [V] vendor documents, [T] constants and code in
PopLibs or in other public sources, [M] published measurements, [I] arithmetic on these.
The C600 is a board with the same processor and tiles; the author of an independent compiler for it
(osmarks/ipu-stack on GitHub) published measurements and findings about the exchange.
docs/popsparse-fidelity.md shows their effect.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from dynsparse._core.checks import (
    check_choice,
    check_integer,
    check_types,
    check_within,
    shorten,
)
from popsparse.machine.dtypes import FLOAT, HALF, as_dtype


@dataclass(frozen=True)
class Fact:
    """A number with its range; the model uses `typical`."""

    name: str
    low: float
    typical: float
    high: float
    unit: str
    source: str


SYNC = Fact(
    "sync",
    90,
    126,
    126,
    "cycles",
    "[T] Target::getMaxIPUSyncDelay of the C600, which PopLibs' planner of reductions charges for "
    "each of its steps; the planner of its CTC loss takes 90",
)
EXCHANGE_SETUP = Fact(
    "exchange set-up",
    0,
    111,
    374,
    "cycles",
    "[M] from the arrival of the last tile at an exchange to the last one's exit, three exchanges "
    "of 1,472 tiles on a C600 take 237, 237 and 238 cycles more than they were scheduled for; less "
    "the sync. High: an old model of PopLibs charges 500 for both",
)
EXCHANGE_FILL = Fact(
    "exchange fill",
    52,
    74,
    96,
    "cycles",
    "[M] a word arrives 52 cycles, and 2 more for each of 23 rows of tiles, after its receiver "
    "turned to the sender; typical is the middle row",
)
SUPERSTEP = Fact(
    "superstep",
    SYNC.low + EXCHANGE_SETUP.low + EXCHANGE_FILL.low,
    SYNC.typical + EXCHANGE_SETUP.typical + EXCHANGE_FILL.typical,
    SYNC.high + EXCHANGE_SETUP.high + EXCHANGE_FILL.high,
    "cycles",
    "[I] the sum of sync, set-up and fill: `Target.sync_cycles`",
)
COPY_LAUNCH = Fact(
    "launch of a local copy",
    0,
    0,
    288,
    "cycles",
    "[V] the model run of Poplar's sixth tutorial charges none. 83 would be 11 of the supervisor "
    "and 12 instructions of each of six workers, as PopLibs counts vertices that only load and "
    "store; high: [M] a copy by six workers on a C600",
)

STACKS = Fact(
    "stacks",
    1760,
    3168,
    6240,
    "bytes a tile",
    "[V] printed profile of a program, of every tile: six workers of 512 and 96 of the supervisor. "
    "Low: [T] all state of the C600 compiler's runtime; high: workers of 1,024, as tests of "
    "PopLibs ask for",
)
KERNEL_CODE = Fact(
    "code of a product's vertex",
    648,
    1240,
    1720,
    "bytes",
    "[T] four for each instruction of the kernels in PopLibs: 162 for static elements, 310 for "
    "static blocks of 16, 430 for dynamic ones",
)
SUM_CODE = Fact(
    "code of a sum's vertex",
    772,
    772,
    2288,
    "bytes",
    "[T] the same: 193 instructions for strided partial sums; 379 more for any others",
)
CONTROL_CODE = Fact(
    "control code",
    20,
    175,
    295,
    "bytes a step and tile",
    "[V] the same profile: 851,272 bytes on 1,216 tiles for 4 compute sets. Low: the five "
    "instructions that start one; high: [M] 18,884 bytes for the 64 exchanges of a model on a C600",
)
HOST_EXCHANGE = Fact(
    "host exchange",
    0,
    298,
    298,
    "bytes a tile",
    "[V] the same profile: 351,328 bytes of code and 10,512 of packet headers on 1,216 tiles",
)
EXCHANGE_ENTRY = Fact(
    "entry and return of an exchange", 8, 8, 16, "bytes", "[M] rows of the C600's exchange"
)
SEND = Fact("send", 8, 8, 8, "bytes", "[M] the same: an address and a send")
LONG_SEND = Fact("longer send", 0, 4, 4, "bytes", "[M] the same: of more than 64 words")
SHORT_WORDS = 64
"""Words of the longest send that is one instruction."""
RECEIVE = Fact("receive", 4, 8, 8, "bytes", "[M] the same: turn to the sender and away")
RECEIVE_POINTER = Fact(
    "pointer of a receive",
    4,
    4,
    4,
    "bytes",
    "[M] the same: where it does not go on at the end of the one before. The sums of these five "
    "were 14 % below to 18 % above the code of eight scheduled exchanges",
)

LINK = Fact(
    "link",
    423e3 / 8 / 4,
    423e3 / 8 / 4,
    16_000,
    "MB/s each way",
    "[V] a sample of gc-iputraffictest: 423 Gbit/s, both ways together; [I] over the two links of "
    "a rail, as the data sheet's 512 Gbit/s of a Bow-2000 are. High: the published 320 GB/s of ten "
    "links, both ways together. An old model of PopLibs has 14,603: 0.85 of 128 Gibit/s",
)
PAIR_LINKS = Fact(
    "links within a pair",
    4,
    4,
    4,
    "links",
    "[T] PopLibs' constraints of its model: processors 2 i and 2 i + 1 are a rung of a ladder",
)
CROSS_LINKS = Fact(
    "links of a pair for the way to others",
    2,
    2,
    2,
    "links",
    "[T] the same: what goes to the other side of another rung crosses its own rung on these",
)
RAIL_LINKS = Fact(
    "links from rung to rung",
    2,
    2,
    2,
    "links",
    "[T] the same: two up and two down, so that a processor has the published ten. [M] Citadel: "
    "the ladder is no torus",
)
STREAMING = Fact(
    "streaming memory",
    64,
    64,
    64,
    "GB a processor",
    "[V] a Bow-2000's data sheet: up to 256 GB for its four",
)

PRESETS = ("mk2", "bow")  # names of functions of `Target`

# Conv units by (input, partials) type: [T] PopLibs. 64, 32 and 16 multiply-accumulates a cycle,
# which the published peaks of 250 (half) and 62.5 TFLOP/s (float) on Mk2 confirm.
_CONV_UNITS = {(HALF, HALF): 16, (HALF, FLOAT): 8, (FLOAT, FLOAT): 16}

# The upper bound of each: far above any machine, yet small enough to simulate and plan for.
_INTEGERS = {
    "tiles": 2**16,
    "processors": 2**10,
    "bytes_per_tile": 2**40,
    "workers": 2**10,
    "data_path_bits": 2**16,
    "exchange_bus_tiles": 2,
    "coefficient_load_bytes_per_cycle": 2**16,
    "remote_bytes": 2**50,
}
_POSITIVE = (
    "exchange_bytes_per_cycle",
    "memcpy_bytes_per_cycle",
    "clock_hz",
    "host_read_bytes_per_second",
    "host_write_bytes_per_second",
    "remote_read_bytes_per_second",
    "remote_write_bytes_per_second",
    "link_bytes_per_second",
)
_NOT_NEGATIVE = (
    "exchange_fragment_cycles",
    "sync_cycles",
    "local_copy_cycles",
    "link_sync_cycles",
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A bulk-synchronous machine of tiles with private memory, joined by an exchange.

    `Target.mk2()` and `Target.bow()` are Graphcore's GC200 and Bow; any field can be changed:
    `Target(tiles=4, bytes_per_tile=4096)`, `Target.bow(sync_cycles=0)`. Defaults are the Mk2's.

    Args:
        name: shown in reports.
        tiles: number of cores with their own memory, on all processors, at most 65,536. [V]
            profiles and data sheets.
        processors: number of chips; each has an equal, contiguous range of the tiles.
        bytes_per_tile: memory of one tile, bytes. [V] text of Poplar's out-of-memory error.
        workers: hardware threads of a tile. Each issues every `workers`-th cycle. [V] Poplar
            assembly programming guide.
        data_path_bits: width of a load or store. [T] PopLibs' vector widths: 4 half, 2 float.
        clock_hz: cycles per second. [V] `gc-info` of an M2000; Bow-2000 data sheet.
        exchange_bytes_per_cycle: bytes a tile receives and, at the same time, sends in each cycle.
            [T] `Target::getExchangeBytesPerCycle`; [I] gives the published 7.8 TB/s of a whole Mk2.
        exchange_bus_tiles: number of neighbouring tiles that share a bus (1: none). Data that all
            of them receive arrives at the sum of their rates. [V]
            `Target::getTilesPerSharedExchangeBus`.
        exchange_fragment_cycles: control instructions per contiguous fragment received. They run
            in parallel to the payload, so the longer of the two counts. [T] an independent compiler
            for the C600.
        sync_cycles: cost of a superstep before its first byte arrives: the synchronisation of all
            tiles, the code around an exchange, the way across the chip: `SUPERSTEP`.
        memcpy_bytes_per_cycle: copies inside a tile. [T] `Target::getMemcpyBytesPerCycle`.
        local_copy_cycles: overhead of each copy inside a tile: `COPY_LAUNCH`.
        coefficient_load_bytes_per_cycle: loading weights into the matrix units. [T] PopLibs: 64-bit
            loads unless the option use128BitConvUnitLoad is set.
        host_read_bytes_per_second: host to tiles, all tiles together. [V] `gc-hosttraffictest`
            sample: 26 Gbit/s, host buffer to tile.
        host_write_bytes_per_second: tiles to host. [V] the same: 30 Gbit/s.
        remote_read_bytes_per_second: memory beside a processor to its tiles. [V] the same: buffer
            to tile.
        remote_write_bytes_per_second: tiles to that memory, reportedly 3 to 20 times slower than
            the links. [V] the same: tile to buffer.
        remote_bytes: bytes of that memory per processor: `STREAMING`.
        link_bytes_per_second: rate of one link between two processors in each direction, both at
            the same time: `LINK`. Number of links between processors: `PAIR_LINKS`,
            `CROSS_LINKS`, `RAIL_LINKS`.
        link_sync_cycles: cost of each synchronisation of all processors, if there are several.
            [T] `Target::getGlobalSyncCycles` of the C600. Uncertain.

    Raises:
        TypeError, ValueError: a field that is not a number, or out of range.
    """

    name: str = "custom"
    tiles: int = 1472
    bytes_per_tile: int = 624 * 1024
    workers: int = 6
    data_path_bits: int = 64
    clock_hz: float = 1.33e9
    exchange_bytes_per_cycle: float = 4
    exchange_bus_tiles: int = 2
    exchange_fragment_cycles: float = 3
    sync_cycles: float = SUPERSTEP.typical
    memcpy_bytes_per_cycle: float = 8
    local_copy_cycles: float = COPY_LAUNCH.typical
    coefficient_load_bytes_per_cycle: int = 8
    host_read_bytes_per_second: float = 26e9 / 8
    host_write_bytes_per_second: float = 30e9 / 8
    remote_read_bytes_per_second: float = 26e9 / 8
    remote_write_bytes_per_second: float = 30e9 / 8
    processors: int = 1
    remote_bytes: int = int(STREAMING.typical * 1e9)
    link_bytes_per_second: float = LINK.typical * 1e6
    link_sync_cycles: float = 600

    def __post_init__(self) -> None:
        for name, most in _INTEGERS.items():
            number = check_integer(name, getattr(self, name), 1)
            if number > most:
                raise ValueError(f"{name} must be at most {most:,}, got {number}")
            object.__setattr__(self, name, number)
        for names, span in ((_POSITIVE, "(0, inf)"), (_NOT_NEGATIVE, "[0, inf)")):
            for name in names:
                check_within(name, getattr(self, name), span)
        if self.data_path_bits % 32:
            raise ValueError(f"data_path_bits must be a multiple of 32, got {self.data_path_bits}")
        grain = self.processors * (self.exchange_bus_tiles if self.processors > 1 else 1)
        if self.tiles % grain:
            raise ValueError(
                f"tiles must be a multiple of {grain}, so that each of {self.processors} "
                f"processors has the same number of whole buses, got {self.tiles}"
            )

    @classmethod
    def mk2(cls, **changes: Any) -> Target:
        """Graphcore's GC200 (Mk2): 1,472 tiles of 624 KiB at 1.33 GHz."""
        return cls(**{"name": "mk2", **changes})

    @classmethod
    def bow(cls, **changes: Any) -> Target:
        """Graphcore's Bow: the Mk2 at 1.85 GHz."""
        return cls(**{"name": "bow", "clock_hz": 1.85e9, **changes})

    @classmethod
    @check_types
    def pod(
        cls, processors: int, processor: str = "bow", tiles: int = 1472, **changes: Any
    ) -> Target:
        """Several processors joined by links.

        Args:
            processors: number of processors.
            processor: "bow" or "mk2".
            tiles: tiles of each processor.
            changes: any other field.
        """
        count = check_integer("processors", processors, 1)
        each = check_integer("tiles", tiles, 1)
        sizes = {"name": f"pod{count}-{processor}", "tiles": count * each, "processors": count}
        return cls.named(processor).with_(**{**sizes, **changes})

    @property
    def processor_tiles(self) -> int:
        """Tiles of one processor."""
        return self.tiles // self.processors

    @property
    def whole_sync_cycles(self) -> float:
        """Cost of a synchronisation of all processors."""
        return self.sync_cycles if self.processors == 1 else self.link_sync_cycles

    @check_types
    def share(self, replicas: int) -> Target:
        """The target of one replica: its share of the processors.

        Raises:
            ValueError: replicas cannot share the processors evenly.
        """
        count = check_integer("replicas", replicas, 1)
        if self.processors % count:
            raise ValueError(
                f"replicas must share {self.processors} processors evenly, got {count}: use "
                "Target.pod(n) with n a multiple of replicas"
            )
        if count == 1:
            return self
        return self.with_(tiles=self.tiles // count, processors=self.processors // count)

    @classmethod
    @check_types
    def named(cls, name: str, **changes: Any) -> Target:
        """The preset of this name: "mk2" or "bow"."""
        preset: Target = getattr(cls, check_choice("target", name, PRESETS))(**changes)
        return preset

    def with_(self, **changes: Any) -> Target:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def vector_width(self, dtype: Any) -> int:
        """Elements of one load: 4 half or 2 float on a 64-bit path."""
        return self.data_path_bits // (8 * as_dtype(dtype).size)

    def conv_units(self, inputs: Any, partials: Any) -> int:
        """Matrix units usable for these types: 16, or 8 for float16 to float32."""
        pair = (as_dtype(inputs), as_dtype(partials))
        if pair not in _CONV_UNITS:
            raise ValueError(
                f"matrix units take float16 to float16, float16 to float32 and float32 to float32, "
                f"got {pair[0].name} to {pair[1].name}"
            )
        return _CONV_UNITS[pair]

    def peak_flops(self, dtype: Any) -> float:
        """Floating-point operations per cycle of a tile's matrix units on operands of this type:
        128 for half, 32 for float, 0 for integers."""
        return {HALF: 128.0, FLOAT: 32.0}.get(as_dtype(dtype), 0.0)

    @check_types
    def seconds(self, cycles: float) -> float:
        """Convert cycles to seconds."""
        if not isinstance(cycles, (int, float, np.number)) or isinstance(cycles, bool):
            raise TypeError(f"cycles must be a number, got {shorten(cycles)}")
        return float(cycles) / self.clock_hz

    def to_dict(self) -> dict[str, Any]:
        """Every field, for reports."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
