"""Distribution of a pattern's non-zeros over the tiles: buckets, meta-info, spills."""
