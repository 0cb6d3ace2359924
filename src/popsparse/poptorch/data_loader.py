"""A data loader for calls of many steps, which reads in the background."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils import data

from dynsparse._core.checks import check_integer, check_kind
from popsparse.poptorch.options import DataLoaderMode, Options

_AHEAD = 3
"""Number of combined batches read ahead."""


class DataLoader(data.DataLoader):
    """A `torch.utils.data.DataLoader` of combined batches.

    A combined batch is the input of one call of a wrapped model: batch_size x deviceIterations x
    replicationFactor x gradientAccumulation samples. A last, incomplete one is dropped.

    Args:
        options: options of the model.
        dataset: a dataset with or without a length.
        batch_size: batch size of the model, in samples.
        shuffle, num_workers: as in torch. Shuffling uses its own generator, seeded by
            options.randomSeed or from torch's global generator when the loader is created, so that
            reading ahead does not change the random numbers of the training.
        mode: Async reads the next combined batches in a thread (with num_workers, in processes)
            while the model computes; Sync reads on request. A dataset that draws from torch's
            global generator is reproducible only with Sync or num_workers.
        more: further arguments of torch's loader.

    Raises:
        TypeError: options or a mode of another type. ValueError: sizes below 1, and what torch
            raises.
    """

    def __init__(
        self,
        options: Options,
        dataset: data.Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        num_workers: int = 0,
        drop_last: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Async,
        **more: Any,
    ) -> None:
        check_kind("options", options, Options, "poptorch.Options")
        check_kind("mode", mode, DataLoaderMode, "one of poptorch.DataLoaderMode")
        size = check_integer("batch_size", batch_size, 1)
        if drop_last is not True:
            raise ValueError("drop_last must be True: a call needs a whole combined batch")
        if shuffle and "generator" not in more:
            seed = options.random_seed
            if seed is None:
                seed = int(torch.randint(1 << 62, ()))
            more["generator"] = torch.Generator().manual_seed(seed)
        self.combinedBatchSize = size * options.device_iterations * options.batches_per_step
        self._in_thread = mode is DataLoaderMode.Async and num_workers == 0
        self._synthetic = options.synthetic_data
        super().__init__(
            dataset,
            batch_size=self.combinedBatchSize,
            shuffle=shuffle,
            num_workers=num_workers,
            drop_last=True,
            **more,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        if self._synthetic:
            first = next(batches, None)
            if first is None:
                return iter(())
            try:
                return iter(itertools.repeat(first, len(self)))
            except TypeError:  # a dataset without a length
                return itertools.repeat(first)
        return _read_ahead(batches) if self._in_thread else batches


def _read_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, read in a thread that ends with the iteration."""
    end = object()
    reader = ThreadPoolExecutor(1, thread_name_prefix="poptorch.DataLoader")
    try:
        waiting = deque(reader.submit(next, batches, end) for _ in range(_AHEAD))
        while (batch := waiting.popleft().result()) is not end:
            waiting.append(reader.submit(next, batches, end))
            yield batch
    finally:
        reader.shutdown(cancel_futures=True)
