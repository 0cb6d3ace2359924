"""The best candidates so far, chunk by chunk of the gradient."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dynsparse.encoding import empty
from dynsparse.ops.grow.free_positions import positions_between, positions_in_rows
from dynsparse.ops.grow.selection import select
from dynsparse.pattern import SparsePattern


class Best:
    """The best `k` free positions so far, in order of position, in room for one chunk more.

    Args:
        k: how many.
        chunk: the most scores that `add` is given at once.
        threshold: scores that do not exceed it are not looked at.
        library: the compiled kernels, which rank float32 on the CPU; None: plain torch.
    """

    def __init__(
        self,
        k: int,
        chunk: int,
        threshold: float,
        dtype: torch.dtype,
        device: torch.device,
        library: ctypes.CDLL | None,
    ) -> None:
        self.k = k
        self.scores = empty(k + chunk, dtype=dtype, device=device)
        self.flat = empty(k + chunk, dtype=torch.int64, device=device)
        self.count = 0
        self.threshold = threshold
        self._library = library

    def add(self, scores: Tensor, pattern: SparsePattern, exclude: Tensor, first: int) -> None:
        """Take in the scores [rows, in/b] of the block rows from `first` on; they are overwritten.

        Positions of the pattern and of `exclude` are left out. Signs do not matter.
        """
        # A score equal to the threshold loses against those before it: it comes later.
        offset = first * pattern.grid[1]
        excluded = positions_between(exclude, offset, offset + scores.numel())
        if self._library is None:
            flat = scores.view(-1).abs_()
            flat[positions_in_rows(pattern, first, first + len(scores)).to(scores.device)] = -1.0
            flat[excluded.to(scores.device)] = -1.0
            self._scan(flat, offset)
        else:
            if len(excluded):
                scores.view(-1)[excluded] = float("nan")
            self._scan_compiled(self._library, scores, pattern, first, offset)

    def _scan(self, scores: Tensor, offset: int) -> None:
        found = (scores > self.threshold).nonzero().flatten()
        if self.count + len(found) > len(self.scores):
            self.compact()
            found = found[scores[found] > self.threshold]
        end = self.count + len(found)
        torch.index_select(scores, 0, found, out=self.scores[self.count : end])
        torch.add(found, offset, out=self.flat[self.count : end])
        self.count = end

    def _scan_compiled(
        self,
        library: ctypes.CDLL,
        scores: Tensor,
        pattern: SparsePattern,
        first: int,
        offset: int,
    ) -> None:
        rows, width = scores.shape
        while True:
            room = len(self.scores) - self.count
            found = library.dynsparse_grow_scan(
                scores.data_ptr(),
                rows,
                width,
                pattern.row_ptr.data_ptr() + first * pattern.row_ptr.itemsize,
                pattern.sorted_cols.data_ptr(),
                self.threshold,
                self.k,
                offset,
                self.scores.data_ptr() + self.count * self.scores.itemsize,
                self.flat.data_ptr() + self.count * self.flat.itemsize,
                room,
                torch.get_num_threads(),
            )
            if found < 0:
                raise MemoryError("no memory for a scan of growth scores")
            if found <= room:
                break
            self.compact()
        self.count += found

    def compact(self) -> None:
        """Keep only the best `k`, and raise the threshold to the last of them."""
        if self.count > self.k and self._library is not None:
            self._compact_compiled(self._library)
        elif self.count > self.k:
            keep = select(self.scores[: self.count], self.k)
            self.scores[: self.k] = self.scores[keep]
            self.flat[: self.k] = self.flat[keep]
        self.count = min(self.count, self.k)
        if self.count == self.k:
            self.threshold = float(self.scores[: self.k].min())

    def _compact_compiled(self, library: ctypes.CDLL) -> None:
        status = library.dynsparse_grow_compact(
            self.scores.data_ptr(),
            self.flat.data_ptr(),
            self.count,
            self.k,
            torch.get_num_threads(),
        )
        if status:
            raise MemoryError("no memory to select the best of many scores")
