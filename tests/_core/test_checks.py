"""Argument checks shared by the package."""

import math

import numpy as np
import pytest
import torch

import dynsparse as ds
from dynsparse._core.checks import (
    check_choice,
    check_integer,
    check_not_negative,
    check_within,
    is_number,
)
from dynsparse.nn import SparseLinear


def test_valid_values_are_returned():
    assert check_integer("n", np.int64(3), 3) == 3
    assert type(check_integer("n", np.int64(-3))) is int
    assert check_within("f", 0, "[0, 1]") == 0
    assert check_within("f", 1, "(0, 1]") == 1
    assert check_within("p", 0, "[0, 1)") == 0
    assert check_within("p", 0.5, "(0, 1)") == 0.5
    assert check_not_negative("w", 2) == 2.0
    assert check_choice("kind", "a", {"a": 1, "b": 2}) == "a"
    assert is_number(2.5)
    assert not is_number(True)
    assert not is_number("2")


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (lambda: check_integer("n", 1.0), TypeError, "n must be an integer, got 1.0"),
        (lambda: check_integer("n", True), ValueError, "n must be an integer, got True"),
        (lambda: check_integer("n", True, 0), ValueError, "n must be an integer of at least 0"),
        (lambda: check_integer("n", 2, 3), ValueError, "n must be an integer of at least 3, got 2"),
        (
            lambda: check_within("f", "1", "[0, 1]"),
            TypeError,
            "f must be a number in [0, 1], got '1'",
        ),
        (
            lambda: check_within("f", True, "[0, 1]"),
            TypeError,
            "must be a number in [0, 1], got True",
        ),
        (lambda: check_within("f", 0, "(0, 1]"), ValueError, "f must be a number in (0, 1], got 0"),
        (
            lambda: check_within("f", math.nan, "[0, 1]"),
            ValueError,
            "must be a number in [0, 1], got",
        ),
        (lambda: check_within("p", 1, "[0, 1)"), ValueError, "p must be a number in [0, 1), got 1"),
        (lambda: check_within("p", 1.5, "[0, 1]"), ValueError, "p must be a number in [0, 1]"),
        (lambda: check_within("p", None, "[0, 1]"), TypeError, "p must be a number in"),
        (
            lambda: check_not_negative("w", -1),
            ValueError,
            "w must be a finite number of at least 0",
        ),
        (lambda: check_not_negative("w", math.inf), ValueError, "w must be a finite number"),
        (lambda: check_not_negative("w", True), ValueError, "w must be a finite number"),
        (lambda: check_choice("k", "c", ["a", "b"]), ValueError, "k must be one of a, b, got 'c'"),
        (lambda: check_choice("k", None, ("a",)), ValueError, "k must be one of a, got None"),
        (lambda: check_choice("k", ["a"], {"a": 1}), ValueError, "k must be one of a, got ['a']"),
    ],
)
def test_wrong_values_raise(check, error, message):
    with pytest.raises(error) as told:
        check()
    assert message in str(told.value)


def test_sparsity_argument_suggests_density():
    dense = torch.nn.Linear(8, 8)
    for call in (
        lambda: ds.sparsify(dense, sparsity=0.9),
        lambda: SparseLinear(8, 8, sparsity=0.9),
    ):
        with pytest.raises(TypeError, match=r"no argument sparsity: pass density="):
            call()
