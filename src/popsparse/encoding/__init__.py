"""The non-zeros of a pattern dealt to the tiles: buckets, meta-info, spills."""
