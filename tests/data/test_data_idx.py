"""The IDX reader: round trips, and a one-line error for each damaged file."""

import contextlib
import gzip
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.data import read_idx


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(">HBB", 0, 8, array.ndim)
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("array", [IMAGES, IMAGES[0, 0], IMAGES[:0]])
def test_round_trip(tmp_path, zipped, array):
    file = tmp_path / "file"
    file.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    got = read_idx(file, array.ndim)
    assert got.dtype == np.uint8
    assert got.shape == array.shape
    assert np.array_equal(got, array)


BAD = {
    "empty": (b"", "got only 0 bytes"),
    "short magic": (b"\0\0\x08", "got only 3 bytes"),
    "text": (b"<html>no such file</html>", "got the magic 3c68746d"),
    "labels for images": (idx(IMAGES[0, 0]), "3 dimension"),
    "floats": (b"\0\0\x0d\x03" + idx(IMAGES)[4:], "unsigned bytes"),
    "cut header": (idx(IMAGES)[:10], "truncated inside the header"),
    "cut body": (idx(IMAGES)[:-1], "expected 24 bytes for the shape (2, 3, 4), got 23"),
    "too long": (idx(IMAGES) + b"x", "expected 24 bytes for the shape (2, 3, 4), got 25"),
    "promises terabytes": (b"\0\0\x08\x03" + b"\xff" * 12 + b"abc", "truncated: expected"),
    "cut gzip": (gzip.compress(idx(IMAGES))[:-9], "damaged stream"),
    "wrong gzip check": (
        gzip.compress(idx(IMAGES))[:-8] + b"\1\2\3\4" + gzip.compress(idx(IMAGES))[-4:],
        "damaged stream",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_file_raises_one_line(tmp_path, name):
    content, message = BAD[name]
    file = tmp_path / "damaged"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="damaged") as error:
        read_idx(file, 3)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_are_read_or_raise(tmp_path_factory, content, zipped):
    file = tmp_path_factory.mktemp("idx") / "file"
    file.write_bytes(gzip.compress(content) if zipped else b"\0\0\x08\x01" + content)
    with contextlib.suppress(ValueError):
        assert read_idx(file, 1).ndim == 1


def test_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "nowhere", 1)
