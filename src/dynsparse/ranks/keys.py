"""Keys that sort as scores do, and their digits: what a radix select over ranks looks at."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynsparse import native
from dynsparse.encoding import empty, set_places


def key_bits(dtype: torch.dtype) -> int:
    """How many bits the keys of scores have."""
    return 64 if dtype == torch.float64 or not dtype.is_floating_point else 32


def sorting_keys(scores: Tensor, largest: bool) -> tuple[Tensor, int]:
    """Keys in the order of the scores, or in the other order, and how many bits they have.

    Keys are signed, int32 or int64: the order is that of integers.
    """
    bits = key_bits(scores.dtype)
    if bits == 64:
        raw = (scores.double() + 0.0).view(torch.int64)  # -0.0 becomes 0.0
    else:
        library = native.load() if scores.is_cpu else None
        if library is not None:
            own = scores.detach().float().contiguous()
            keys = empty(len(own), dtype=torch.int32, brief=True)
            library.dynsparse_rank_keys(own.data_ptr(), len(own), largest, keys.data_ptr())
            return keys, bits
        raw = (scores.float() + 0.0).view(torch.int32)
    # Of negative numbers larger bits are smaller: theirs but the sign's are turned over.
    keys = (raw >> (bits - 1)).bitwise_and_((1 << (bits - 1)) - 1).bitwise_xor_(raw)
    return (keys if largest else keys.bitwise_not_()), bits


class _Digits(NamedTuple):
    """The digit of each key from bit `shift` on, and how many keys there are of each."""

    keys: Tensor
    shift: int
    bits: int
    counts: Tensor
    digits: Tensor | None  # where the kernels do not make them as they go

    def alike(self, digit: int) -> Tensor:
        """The keys with this digit."""
        if self.digits is not None:
            return self.keys[(self.digits == digit).nonzero().flatten()]
        library = native.load()
        assert library is not None
        found = empty(int(self.counts[digit]), dtype=torch.int32)
        library.dynsparse_rank_narrow(
            self.keys.data_ptr(),
            len(self.keys),
            self.shift,
            self.bits,
            digit,
            found.data_ptr(),
            len(found),
        )
        return found


def digits_of(keys: Tensor, shift: int, bits: int, *, first: bool) -> _Digits:
    """Digits of `bits` bits, at most 11, from bit `shift` on. The first ones, of signed keys, are
    counted from the lowest on, so that they ascend with the keys."""
    bins = 1 << bits
    top = first and shift + bits == 32
    library = native.load() if keys.is_cpu and keys.dtype == torch.int32 else None
    if library is not None and (top or not first):
        keys = keys.contiguous()
        counts = torch.empty(bins, dtype=torch.int32)
        library.dynsparse_rank_digits(keys.data_ptr(), len(keys), shift, bits, counts.data_ptr())
        return _Digits(keys, shift, bits, counts, None)
    digits = keys >> shift
    digits = digits.add_(bins // 2) if first else digits.bitwise_and_(bins - 1)
    return _Digits(keys, shift, bits, torch.bincount(digits, minlength=bins), digits)


def packed_bits(numbers: Tensor, first: int, end: int) -> Tensor:
    """Ascending numbers in [first, end), int64, as bits: uint8 [ceil of (end - first) / 8]."""
    library = native.load() if numbers.is_cpu else None
    if library is None:
        there = np.zeros(end - first, np.uint8)
        there[(numbers - first).cpu().numpy()] = 1
        return torch.from_numpy(np.packbits(there, bitorder="little"))
    numbers = numbers.contiguous()
    bits = torch.empty(-(-(end - first) // 8), dtype=torch.uint8)
    library.dynsparse_rank_pack(numbers.data_ptr(), len(numbers), first, bits.data_ptr(), len(bits))
    return bits


def unpack_bits(bits: Tensor, first: int, out: Tensor) -> None:
    """The way back, on the CPU: `out` gets the numbers, of which it has just the right number."""
    library = native.load()
    if library is None:
        there = np.unpackbits(bits.numpy(), bitorder="little")
        set_places(torch.from_numpy(there).view(torch.bool), first, out)
        return
    bits = bits.contiguous()
    library.dynsparse_rank_unpack(bits.data_ptr(), len(bits), first, out.data_ptr())
