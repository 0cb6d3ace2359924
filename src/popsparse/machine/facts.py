"""What a step costs, and what a program takes of a tile, besides its data: facts with their range.

None is fitted to a published benchmark. Sources: [V] vendor documents, [T] constants and code in
PopLibs or in other public sources, [M] measured and published by somebody, [I] arithmetic on these.
The C600 is a board with the same processor and tiles; an independent compiler for it
(osmarks/ipu-stack on GitHub) publishes its measurements and what it found of the exchange.
docs/popsparse-fidelity.md shows what they change.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A number with its range; `typical` is what the model takes."""

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

FACTS = (
    SYNC,
    EXCHANGE_SETUP,
    EXCHANGE_FILL,
    SUPERSTEP,
    COPY_LAUNCH,
    STACKS,
    KERNEL_CODE,
    SUM_CODE,
    CONTROL_CODE,
    HOST_EXCHANGE,
    EXCHANGE_ENTRY,
    SEND,
    LONG_SEND,
    RECEIVE,
    RECEIVE_POINTER,
)
