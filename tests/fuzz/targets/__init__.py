"""What is fuzzed: one module a reader, with `SEEDS` and `run`.

`run(data)` makes a file of `data`, reads it, and returns whether it was read or refused as the
reader documents. Anything else it raises is a finding. The first byte of `data` is the way in which
the rest becomes a file: as it is, or within what would stop a blind fuzzer at once (a digest, an
archive, a length that must be right).
"""

NAMES = (
    "bpe", "checkpoints", "idx", "json", "options", "records", "specs", "text", "tokens",
    "weights",
)  # fmt: skip
