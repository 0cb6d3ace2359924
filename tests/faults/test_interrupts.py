"""Ctrl-C at any point of a step leaves the state before or after the step, never a mixture.

Signals are sent at random times and at chosen lines of code; `INTERRUPTS=1000` (make faults) sends
that many at random times, and more at lines.
"""

import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
from tests.training.states import ALGORITHMS, backward, make, same, state_of

from dynsparse._core.interrupts import defer_signals

MOMENTS = int(os.environ.get("INTERRUPTS", "96"))
EVERYWHERE = max(4, MOMENTS // 50)

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need it"
)


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class SlowAdam(torch.optim.Adam):
    """An optimizer with a long step in Python code."""

    def step(self, closure=None):
        for _ in range(10):
            time.sleep(0.0001)
        return super().step(closure)


def whole_step(trainer):
    trainer.step()


def split_step(trainer):
    trainer.before_optimizer_step()
    with defer_signals():
        trainer.optimizer.step()
    trainer.after_optimizer_step()


def states_around(name, optimizer, steps):
    """Return (state before, state after) each step of an uninterrupted training."""
    model, trainer = make(name, optimizer)
    found = []
    for _ in range(steps):
        backward(model, trainer)
        before = state_of(model, trainer)
        trainer.step()
        found.append((before, state_of(model, trainer)))
    return found


def optimizer_of(slow):
    return (lambda model: SlowAdam(model.parameters(), 0.01)) if slow else None


def send_after(go, wait):
    go.wait()
    time.sleep(wait)
    os.kill(os.getpid(), signal.SIGINT)


# After the step old indexes are freed. What a signal raises in their weak references' callbacks
# Python swallows, with a warning: then it does not count.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_signals_at_random_times(name, slow):
    moments = -(-MOMENTS // (2 * len(ALGORITHMS)))
    steps = 10
    expected = states_around(name, optimizer_of(slow), steps)
    chance = random.Random(name)
    model, trainer = make(name, optimizer_of(slow))
    begun = time.perf_counter()
    backward(model, trainer)
    trainer.step()
    duration = time.perf_counter() - begun
    caught = 0
    while caught < moments:
        if trainer.steps == steps:
            model, trainer = make(name, optimizer_of(slow))
        at = trainer.steps
        backward(model, trainer)
        before, after = expected[at]
        assert same(state_of(model, trainer), before)
        go = threading.Event()
        thread = threading.Thread(target=send_after, args=(go, chance.random() * duration))
        thread.start()
        inside = False
        try:
            go.set()
            inside = True
            begun = time.perf_counter()
            trainer.step()
            duration = 0.5 * duration + 0.5 * (time.perf_counter() - begun)
            inside = False
            thread.join()
            time.sleep(0.002)  # where it came too late
        except KeyboardInterrupt:
            thread.join()
            caught += inside
        done = trainer.steps - at
        assert done in (0, 1)
        assert same(state_of(model, trainer), (before, after)[done])
    assert caught == moments
    # The model still works, and the training ends like the other.
    while trainer.steps < steps:
        at = trainer.steps
        backward(model, trainer)
        trainer.step()
        assert same(state_of(model, trainer), expected[at][1])


def count_lines(step, trainer):
    """Count the lines of this package that a step executes."""
    count = 0

    def tracer(frame, event, arg):
        nonlocal count
        if "dynsparse" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return tracer

    sys.settrace(tracer)
    try:
        step(trainer)
    finally:
        sys.settrace(None)
    return count


def interrupt_at(line, step, trainer):
    """Run the step with a signal at its n-th line in this package; return if it was interrupted."""
    count = 0

    def tracer(frame, event, arg):
        nonlocal count
        if "dynsparse" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        if event == "line" and count == line:
            signal.raise_signal(signal.SIGINT)
        return tracer

    sys.settrace(tracer)
    try:
        step(trainer)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("step", [whole_step, split_step])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_signals_at_lines_of_a_step(name, step):
    model, trainer = make(name)
    backward(model, trainer)
    trainer.step()
    backward(model, trainer)
    total = count_lines(step, trainer)
    assert total > 200
    chosen = {*range(1, 16), *random.Random(1).sample(range(16, total - 4), EVERYWHERE)}
    chosen |= set(range(total - 4, total + 1))
    _, (first, last) = states_around(name, None, 2)
    interrupted = 0
    for line in sorted(chosen):
        model, trainer = make(name)
        backward(model, trainer)
        trainer.step()
        backward(model, trainer)
        hit = interrupt_at(line, step, trainer)
        interrupted += hit
        now = state_of(model, trainer)
        if step is whole_step:
            assert same(now, (first, last)[trainer.steps - 1]), line
        elif trainer.steps == 1:
            # Before the optimizer's step, or between its end and what follows: each part is whole.
            trainer.optimizer.zero_grad()
            assert same(now["patterns"], first["patterns"]), line
            assert same(now["trainer"], first["trainer"]), line
        else:
            assert same(now, last), line
    assert interrupted >= len(chosen) - 8


def raise_three_signals(heard):
    with defer_signals():
        with defer_signals():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
        assert heard == []


@pytest.mark.quick
def test_signals_are_delayed_until_the_block_ends():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            raise_three_signals(heard)
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with defer_signals():
            pass
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handler_installed_inside_the_block_stays():
    def own(number, frame):
        raise AssertionError("not called")

    with defer_signals():
        signal.signal(signal.SIGINT, own)
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.parametrize("moment", range(1, 12))
def test_signal_while_a_block_begins_or_ends(moment):
    """At any line of `defer_signals` itself, the signal is delivered, and so are later ones."""

    def block(trainer):
        with defer_signals():
            pass

    hit = interrupt_at(moment, block, None)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with defer_signals():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert hit


def test_other_threads_keep_the_handler():
    seen = []

    def work():
        with defer_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
