"""Decisions over the ranks of torch.distributed: made once, and known to all.

Each is made by the rank that looks after what it is about, and the others hear of it; nothing is
computed on every rank in the hope that it comes out equal.
"""

from dynsparse.ranks.agree import (
    agree_on,
    agreeing,
    differing,
    digest,
    ends_of,
    held_back,
    named_ranks,
    said_the_same,
    texts_of,
)
from dynsparse.ranks.even import even_pieces
from dynsparse.ranks.exchanged import exchanged_bytes
from dynsparse.ranks.follow import follow_over_ranks
from dynsparse.ranks.grid import AXES, Part, RankGrid, Slab, check_axes
from dynsparse.ranks.grow import topk_over_ranks
from dynsparse.ranks.joint import JointRanks
from dynsparse.ranks.keys import key_bits
from dynsparse.ranks.ranks import ALONE, GroupRanks, Ranks, ranks_of
from dynsparse.ranks.select import (
    chunk,
    chunk_of,
    joined,
    kth_over_ranks,
    of_first,
    places,
    select_over_ranks,
    sum_of_all,
)
from dynsparse.ranks.wanted import GrowthWanted

__all__ = [
    "ALONE",
    "AXES",
    "GroupRanks",
    "GrowthWanted",
    "JointRanks",
    "Part",
    "RankGrid",
    "Ranks",
    "Slab",
    "agree_on",
    "agreeing",
    "check_axes",
    "chunk",
    "chunk_of",
    "differing",
    "digest",
    "ends_of",
    "even_pieces",
    "exchanged_bytes",
    "follow_over_ranks",
    "held_back",
    "joined",
    "key_bits",
    "kth_over_ranks",
    "named_ranks",
    "of_first",
    "places",
    "ranks_of",
    "said_the_same",
    "select_over_ranks",
    "sum_of_all",
    "texts_of",
    "topk_over_ranks",
]
