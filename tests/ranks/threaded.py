"""What the tests of ranks share: threads of one process stand for ranks."""

from __future__ import annotations

from fake_ranks import BrokenMoveError, in_threads


def over(size, work, seconds=30.0):
    """The results of `work(ranks)` on each rank; the first error is raised."""
    results = in_threads(size, work, seconds)
    errors = [r for r in results if isinstance(r, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, BrokenMoveError)):
        raise error
    return results


def raised(size, work, seconds=10.0):
    """Type and text of what the ranks raise, which must be one."""
    errors = in_threads(size, work, seconds)
    assert len({(type(e), str(e)) for e in errors}) == 1, errors
    return type(errors[0]), str(errors[0])
