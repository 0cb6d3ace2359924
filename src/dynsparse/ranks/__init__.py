"""Decisions over the ranks of torch.distributed: all ranks reach the same result.

`ranks` has the collectives, `consistency` errors and comparisons over ranks, `select` the selection
of the best scores of all ranks, `grow` growth, and `grid` meshes.
"""

from dynsparse.ranks.consistency import (
    DeferredError,
    are_all_equal,
    check_consistent,
    collective_errors,
    digest,
    find_differing,
    format_ranks,
    gather_texts,
    group_errors,
    min_max_digest,
    sum_over_ranks,
)
from dynsparse.ranks.grid import AXES, DimShard, Placement, RankGrid, ShardSpec
from dynsparse.ranks.grow import GrowRequest, comm_volume, topk_over_ranks
from dynsparse.ranks.ranks import ALONE, GroupRanks, Ranks, ranks_of
from dynsparse.ranks.select import (
    chunk,
    chunk_of,
    gather_sorted,
    key_bits,
    masked_positions,
    select_over_ranks,
)

__all__ = [
    "ALONE",
    "AXES",
    "DeferredError",
    "DimShard",
    "GroupRanks",
    "GrowRequest",
    "Placement",
    "RankGrid",
    "Ranks",
    "ShardSpec",
    "are_all_equal",
    "check_consistent",
    "chunk",
    "chunk_of",
    "collective_errors",
    "comm_volume",
    "digest",
    "find_differing",
    "format_ranks",
    "gather_sorted",
    "gather_texts",
    "group_errors",
    "key_bits",
    "masked_positions",
    "min_max_digest",
    "ranks_of",
    "select_over_ranks",
    "sum_over_ranks",
    "topk_over_ranks",
]
