"""Decisions over the ranks of torch.distributed: made once, and known to all.

Each is made by the rank that looks after what it is about, and the others hear of it; nothing is
computed on every rank in the hope that it comes out equal.
"""

from dynsparse.ranks.consistency import (
    DeferredError,
    all_equal,
    broadcast_from_first,
    check_consistent,
    collective_errors,
    digest,
    find_differing,
    format_ranks,
    gather_texts,
    min_max_digest,
    sum_over_ranks,
)
from dynsparse.ranks.even import rebalance
from dynsparse.ranks.exchanged import comm_volume
from dynsparse.ranks.follow import follow_over_ranks
from dynsparse.ranks.grid import AXES, Part, RankGrid, Slab, check_axes
from dynsparse.ranks.grow import topk_over_ranks
from dynsparse.ranks.joint import StackedRanks
from dynsparse.ranks.keys import key_bits
from dynsparse.ranks.ranks import ALONE, GroupRanks, Ranks, ranks_of
from dynsparse.ranks.select import (
    chunk,
    chunk_of,
    gather_sorted,
    kth_over_ranks,
    masked_positions,
    select_over_ranks,
)
from dynsparse.ranks.wanted import GrowRequest

__all__ = [
    "ALONE",
    "AXES",
    "DeferredError",
    "GroupRanks",
    "GrowRequest",
    "Part",
    "RankGrid",
    "Ranks",
    "Slab",
    "StackedRanks",
    "all_equal",
    "broadcast_from_first",
    "check_axes",
    "check_consistent",
    "chunk",
    "chunk_of",
    "collective_errors",
    "comm_volume",
    "digest",
    "find_differing",
    "follow_over_ranks",
    "format_ranks",
    "gather_sorted",
    "gather_texts",
    "key_bits",
    "kth_over_ranks",
    "masked_positions",
    "min_max_digest",
    "ranks_of",
    "rebalance",
    "select_over_ranks",
    "sum_over_ranks",
    "topk_over_ranks",
]
