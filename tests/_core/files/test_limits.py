"""Limits on memory when reading, and the display of values in errors."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynsparse._core.checks import shorten
from dynsparse._core.files.limits import MOST_DEPTH, VARIABLE, LimitError, parse_json, read_limit


def test_limit_depends_on_file_size_and_environment(monkeypatch):
    assert read_limit() == read_limit(1 << 22) == 256 << 20
    assert read_limit(1 << 30) == 64 << 30
    monkeypatch.setenv(VARIABLE, "1000")
    assert read_limit(1 << 30) == 1000
    monkeypatch.setenv(VARIABLE, "")
    assert read_limit() == 256 << 20


@pytest.mark.parametrize("given", ["0", "-1", "1e9", "many", "9" * 30, "²"])
def test_invalid_limit_raises(monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(ValueError, match=f"{VARIABLE}: expected a number of bytes above 0"):
        read_limit()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(VALUES)
def test_json_equals_json_loads(value):
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 5000, "[" * 101 + "]" * 101, '[{"a":' * 60 + "1"]
)
def test_deeply_nested_json_raises(text):
    with pytest.raises(LimitError, match="nested at most 100 deep"):
        parse_json(text)


def test_brackets_in_strings_do_not_count_as_nesting():
    deep = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert parse_json(deep) == json.loads(deep)
    wide = json.dumps(['[[[{{\\"' * 100, {'"[': "]"}] * 100)
    assert parse_json(wide) == json.loads(wide)


@pytest.mark.parametrize("text", ["", "[", "]" * 200, '"' + "[" * 200, b"\xff", "9" * 5000])
def test_invalid_json_raises(text):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_long_json_raises_unless_the_limit_is_raised(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1600")
    assert parse_json("[" + " " * 98 + "]") == []
    with pytest.raises(LimitError, match=rf"expected at most 100 bytes .* got 101.*{VARIABLE}"):
        parse_json("[" + " " * 99 + "]")
    monkeypatch.setenv(VARIABLE, "3200")
    assert parse_json("[" + " " * 99 + "]") == []


@given(st.lists(st.integers(-1000, 1000), max_size=4) | st.text(max_size=60) | st.floats())
def test_short_values_are_shown_completely(value):
    assert shorten(value) == repr(value)


def test_containers_are_shortened():
    for value in ({"a": [1, (2,), (), {}, []], 3: None}, {1}, b"\xff", True, (1, 2)):
        assert shorten(value) == repr(value)


def test_long_values_are_shortened_without_full_repr():
    doubled: list = []
    for _ in range(100):
        doubled = [doubled] * 9  # printed whole: 9^100 brackets
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    wide = {f"key {i}": "x" * 10_000 for i in range(10_000)}
    for value in (doubled, deep, wide, "x" * 10**7, b"x" * 10**7, 10**100_000, list(range(10**6))):
        text = shorten(value)
        assert len(text) < 250
        assert re.search(r"\.\.\.|bits", text)
        assert "\n" not in text
