"""JSON as in headers, options and figures, compared with the standard library's parser."""

from __future__ import annotations

import json

from dynsparse._core.checks import shorten
from dynsparse._core.files.limits import LimitError, parse_json
from targets.common import refused_as

SEEDS = [
    b'{"period": 0.5, "x": [1, -2e3, true, null, "a\\"[{\\u00e4"]}',
    b"[" * 60 + b"]" * 60,
    b'["' + b"[" * 150 + b'", {"a\\\\": {}}]',
    b'{"a":' * 101 + b"1" + b"}" * 101,
    '["日本", 1e999, NaN]'.encode(),
]


def run(data: bytes) -> None:
    try:
        expected = json.loads(data.decode())
    except (ValueError, RecursionError):
        expected = ...
    with refused_as(ValueError):
        try:
            found = parse_json(data)
        except LimitError:
            return
        assert repr(found) == repr(expected)
        assert len(shorten(found)) <= 250
        return
    assert expected is ..., "refused what is JSON"
