"""GPT-2's merges."""

from __future__ import annotations

from dynsparse.data.text import read_merges
from targets.common import folder, refused_as

SEEDS = ["#version: 0.2\nl o\nlo w\ne r\nĠ t\nĠt h\n".encode(), b"a b\nab ab\nabab c\n"]


def run(data: bytes) -> None:
    place = folder() / "vocab.bpe"
    place.write_bytes(data)
    with refused_as(ValueError):
        merges = read_merges(place)
        assert all(left and right for left, right in merges)
