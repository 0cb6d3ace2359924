"""Arrays in npz files: what NumPy writes is read, what promises too much is not."""

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dynsparse.files.limits import VARIABLE
from dynsparse.files.npz import DAMAGE, open_arrays


@given(
    arrays.arrays(
        st.sampled_from(["<i4", "<i8", ">i4", "u1", "<u8", "<f4", "?"]),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0),
    )
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_writes(tmp_path_factory, save, array):
    file = tmp_path_factory.mktemp("npz") / "a.npz"
    save(file, **{"a": array, "b/c": array})
    with open_arrays(file) as found:
        assert found.names == ["a", "b/c"]
        assert "a" in found
        assert "d" not in found
        again = found.read("b/c")
        assert again.dtype == array.dtype
        assert again.shape == array.shape
        assert np.array_equal(again, array, equal_nan=array.dtype.kind == "f")


def npy(header: str, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + body


def described(dtype: str, shape: str) -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n"


def written(tmp_path, content: bytes, kind: int = zipfile.ZIP_STORED):
    file = tmp_path / "a.npz"
    with zipfile.ZipFile(file, "w", kind) as archive:
        archive.writestr("a.npy", content)
    return file


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (npy(described("<i4", "(1000000000000,)")), "the archive promises"),
        (npy(described("<i4", "(2,)"), bytes(7)), "the archive promises 75"),
        (npy(described("<i4", "(2,)"), bytes(9)), "the archive promises 77"),
        (npy(described("|O", "(2,)"), bytes(16)), "expected an array of numbers"),
        (npy(described("<U1000000000", "()")), "expected an array of numbers"),
        (npy("-" * 9000 + "1"), "expected an array of numbers"),
        (npy("[" * 9000), "expected an array of numbers"),
        (npy(described("<i4", "(" + "1," * 20 + ")"), bytes(4)), "at most 8 dimensions"),
        (b"\x93NUMPY", "expected an array as NumPy writes it"),
        (b"", "expected an array as NumPy writes it"),
    ],
)
def test_headers_that_promise_something_else(tmp_path, content, match):
    with open_arrays(written(tmp_path, content)) as found, pytest.raises(ValueError, match=match):
        found.read("a")


def test_an_array_that_packs_too_well(tmp_path, monkeypatch):
    stream = io.BytesIO()
    np.save(stream, np.zeros(1 << 20, "i8"))
    file = written(tmp_path, stream.getvalue(), zipfile.ZIP_DEFLATED)
    with open_arrays(file) as found:
        assert len(found.read("a")) == 1 << 20
    monkeypatch.setenv(VARIABLE, str(1 << 20))
    with open_arrays(file) as found, pytest.raises(ValueError, match=VARIABLE):
        found.read("a")


def test_other_ways_of_packing_and_damage(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.arange(100))
    file = written(tmp_path, stream.getvalue(), zipfile.ZIP_LZMA)
    with open_arrays(file) as found, pytest.raises(ValueError, match="stored or deflated"):
        found.read("a")
    content = bytearray(written(tmp_path, stream.getvalue()).read_bytes())
    content[300] ^= 1
    file.write_bytes(content)
    with open_arrays(file) as found, pytest.raises(DAMAGE, match="CRC"):
        found.read("a")
    file.write_bytes(content[:-30])
    with pytest.raises(ValueError, match="not an npz archive"), open_arrays(file):
        pass
