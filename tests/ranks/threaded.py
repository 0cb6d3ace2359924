"""Run functions on ranks that are threads of one process."""

from __future__ import annotations

from fake_ranks import BrokenCollectiveError, in_threads


def run_on_ranks(size, work, seconds=30.0):
    """Return the result of `work(ranks)` on each rank; raise the first error."""
    results = in_threads(size, work, seconds)
    errors = [r for r in results if isinstance(r, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, BrokenCollectiveError)):
        raise error
    return results


def common_error(size, work, seconds=10.0):
    """Return type and text of the error that all ranks raise, which must be the same."""
    errors = in_threads(size, work, seconds)
    assert len({(type(e), str(e)) for e in errors}) == 1, errors
    return type(errors[0]), str(errors[0])
