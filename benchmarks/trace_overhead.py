"""The overhead of a trace: training steps with a trace, beside steps without.

    python benchmarks/trace_overhead.py [--pairs 100] [--threads 1]

The network is that of `dynsparse mnist` (784-300-10, density 0.1, RigL) on random images, with
several batch sizes: the shorter a step, the larger the overhead. A window is 36 steps and an
update; windows with and without a trace take turns, and "on" is the median of their ratios. "off"
is computed, since no program without spans exists: the spans of a step, times the cost of a span
while tracing is off, relative to the time of a step. Writing the file at the end is given in
microseconds per span.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import timeit
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch

import dynsparse as ds
from dynsparse.apps.image_classification import mnist
from dynsparse.apps.image_classification.mnist import MnistTraining
from dynsparse.bench.timing import spread
from dynsparse.data import DataSet, LabelledImages
from dynsparse.tracing import span
from dynsparse.tracing.models import hook_models
from dynsparse.tracing.spans import Recorder, set_recorder

STEPS = 180
WINDOW = STEPS // 5


def windows(batch: int) -> Iterator[int]:
    """Train forever; yield the number of steps after each window."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(STEPS * batch, 784, generator=generator)
    train = LabelledImages(images, torch.randint(10, (STEPS * batch,), generator=generator))
    options = mnist.Options(batch_size=batch, epochs=10**6, seed=0)
    training = MnistTraining(options, DataSet("random", train, train), 0)
    while True:
        for _ in training.run_epoch():
            yield training.step


def seconds(training: Iterator[int], recorder: Recorder | None) -> float:
    """Seconds of a window, with a trace or without."""
    set_recorder(recorder)
    with nullcontext() if recorder is None else hook_models():
        before = time.perf_counter()
        next(training)
        taken = time.perf_counter() - before
    set_recorder(None)
    return taken


def off() -> float:
    """Seconds of a span while tracing is off."""

    def spanned() -> None:
        with span("data"):
            pass

    return min(timeit.repeat(spanned, number=10_000, repeat=20)) / 10_000


def writing() -> float:
    """Seconds to write a file, per span."""
    with ds.trace(Path(tempfile.mkdtemp()) / "run.json"):
        for _ in range(100_000):
            with span("data"):
                pass
        before = time.perf_counter()
    return (time.perf_counter() - before) / 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    unseen = off()
    print(f"a span that nobody takes note of: {1e9 * unseen:.0f} ns; {arguments.threads} threads")
    for batch in (16, 128, 1024):
        training = windows(batch)
        seconds(training, None)
        recorder = Recorder(10**7, [], time.perf_counter_ns())
        ratios, steps = [], []
        for pair in range(arguments.pairs):
            # Alternate which of the two comes first.
            order = (None, recorder) if pair % 2 else (recorder, None)
            times = {one: seconds(training, one) for one in order}
            ratios.append(times[recorder] / times[None])
            steps.append(times[None] / WINDOW)
        ratio = spread(ratios)
        step = statistics.median(steps)
        spans = len(recorder.lanes[0].marks) / WINDOW / arguments.pairs
        print(
            f"batch {batch}: a step {1e6 * step:.0f} us; "
            f"on {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]; "
            f"off {1 + spans * unseen / step:.4f} ({spans:.1f} spans)"
        )
    print(f"writing: {1e6 * writing():.1f} us per span")


if __name__ == "__main__":
    main()
