"""A wrong argument of any public callable ends in one short line that names what is wrong.

Each recipe is a right call. One of its arguments is replaced by something wrong, by each value of
`wrong.FIXED` in turn and by what hypothesis draws; the call may serve it, or refuse it with a
ValueError, TypeError or RuntimeError. Anything else is a fault.
"""

from __future__ import annotations

import resource
import warnings
from pathlib import Path

import pytest
from recipes_core import RECIPES
from wrong import FIXED, fault, refusal


@pytest.fixture(autouse=True)
def _bounded():
    """One GiB beside what is mapped now, so that a size that is taken at its word fails."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), before[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", RECIPES)
def test_the_right_call_is_served(name):
    recipe = RECIPES[name]
    recipe.call(**recipe.make())


@pytest.mark.parametrize("name", RECIPES)
def test_every_wrong_argument_gets_a_line(name):
    recipe = RECIPES[name]
    faults = []
    for argument in recipe.make():
        for what, make in FIXED.items():
            error = refusal(recipe.call, recipe.make() | {argument: make()})
            wrong = error and fault(error, recipe.also)
            if wrong:
                faults.append(f"{argument} = {what}: {wrong}")
    assert not faults, "\n".join(faults)
