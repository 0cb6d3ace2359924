"""Seeded mutation, for machines without atheris and for a few seconds in every test run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

_NUMBERS = [
    0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1,
]  # fmt: skip
_PIECES = [
    b"[", b"]", b"{", b"}", b'"', b"\\", b",", b":", b"-", b" ", b"\n", b"\0", b"\xff", b"0",
    b"1e9", b"null", b"true", b"NaN", b"-1", b"1e999", b"\xed\xa0\x80", b"\\ud800", b"&a ", b"*a",
    b"!!int ", b"<<: ", b"[]", b"{}", b'""',
]  # fmt: skip


def mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Apply one to eight changes to `data`; parts may be copied from `others`."""
    changed = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        random.choice(_CHANGES)(random, changed, others)
    return bytes(changed)


def _span(random: Random, data: bytearray) -> slice:
    begin = random.randrange(len(data) + 1)
    return slice(begin, begin + random.choice((1, 2, 4, 8, 32, 1000)))


def _flip(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _put(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    if data:
        data[random.randrange(len(data))] = random.randrange(256)


def _remove(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    del data[_span(random, data)]


def _repeat(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    span = _span(random, data)
    data[span] = data[span] * random.choice((2, 2, 3, 10, 200))
    del data[1 << 14 :]


def _insert(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = random.choice(_PIECES)


def _number(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    size = random.choice((1, 2, 4, 8))
    number = random.choice(_NUMBERS) % (1 << 8 * size)
    at = random.randrange(len(data) + 1)
    data[at : at + size] = number.to_bytes(size, random.choice(("little", "big")))


def _digits(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Replace a decimal number by another."""
    places = [i for i, byte in enumerate(data) if 0x30 <= byte < 0x3A]
    if places:
        at = random.choice(places)
        data[at : at + 1] = str(random.choice((-1, 0, 7, *_NUMBERS, 10**20))).encode()


def _borrow(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = random.choice(others)
    begin = random.randrange(len(other) + 1)
    piece = other[begin : begin + random.choice((4, 16, 64, 1000))]
    data[_span(random, data)] = piece


_CHANGES: list[Callable[[Random, bytearray, Sequence[bytes]], None]] = [
    _flip, _put, _remove, _repeat, _insert, _number, _digits, _borrow,
]  # fmt: skip
