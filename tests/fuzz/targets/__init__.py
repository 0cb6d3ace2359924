"""Fuzz targets: one module per reader, with `SEEDS` and `run`.

`run(data)` writes `data` to a file, reads it, and returns whether it was read or rejected with a
documented error. Any other exception is a finding. The first byte of `data` selects how the rest
becomes a file: unchanged, or wrapped in what would stop a blind fuzzer at once (a digest, an
archive, a valid length).
"""

NAMES = (
    "bpe", "checkpoints", "idx", "json", "options", "records", "specs", "text", "tokens",
    "weights",
)  # fmt: skip
