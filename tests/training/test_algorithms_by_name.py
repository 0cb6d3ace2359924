"""The registry of algorithms by name."""

import dynsparse as ds
from dynsparse.training import SparseTrainer
from dynsparse.training.algorithms import BY_NAME


def test_every_algorithm_is_registered_once():
    exported = {
        thing
        for name in ds.__all__
        if isinstance(thing := getattr(ds, name), type)
        and issubclass(thing, SparseTrainer)
        and thing is not SparseTrainer
    }
    assert len(exported) == 9
    assert {algorithm.trainer for algorithm in BY_NAME.values()} == exported
    assert {name: a.trainer.__name__.lower() for name, a in BY_NAME.items()} == {
        name: name for name in BY_NAME
    }


def test_initial_densities():
    assert BY_NAME["gmp"].first_density(0.1) == 1.0
    assert BY_NAME["granet"].first_density(0.1) == 0.5
    assert BY_NAME["granet"].first_density(0.7) == 0.7
    assert BY_NAME["rigl"].first_density(0.1) == 0.1


def test_options_are_read_from_signatures():
    assert BY_NAME["static"].arguments == frozenset()
    assert "pooling" in BY_NAME["granet"].arguments
    assert "schedule" not in BY_NAME["granet"].arguments
    assert {"seed", "schedule"} <= BY_NAME["topkast"].arguments
