"""Options with several values."""

import pytest

from dynsparse.cli.app import repeat_options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--a 1 2 --b x", "--a 1 --a 2 --b x"),
        ("--a 1 --a 2", "--a 1 --a 2"),
        ("--a 1", "--a 1"),
        ("--a -1 -.5 2", "--a -1 --a -.5 --a 2"),
        ("--b 1 2", "--b 1 2"),
        ("--a 1 2 --flag 3", "--a 1 --a 2 --flag 3"),
        ("--a=1 2", "--a=1 --a 2"),
        ("--a", "--a"),
        ("", ""),
    ],
)
def test_list_values_are_expanded(given, expected):
    assert repeat_options(given.split(), {"--a"}) == expected.split()
