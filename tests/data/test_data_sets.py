"""Data sets: digits, MNIST folders, downloads from a local server."""

import gzip
import hashlib
import http.server
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from dynsparse import data
from dynsparse.data.download import fetch
from dynsparse.data.images import SOURCES, Source

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(">HBB", 0, 8, array.ndim)
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def small_mnist() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    files = {}
    for images, labels, count in ((TRAIN_IMAGES, TRAIN_LABELS, 20), (TEST_IMAGES, TEST_LABELS, 8)):
        files[images] = idx(rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        files[labels] = idx(rng.integers(0, 10, count, dtype=np.uint8))
    return files


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_digits_have_the_format_of_mnist():
    digits = data.load("digits")
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    for part in (digits.train, digits.test):
        assert part.images.dtype == torch.float32
        assert part.images.shape == (len(part), 784)
        assert part.labels.dtype == torch.int64
        assert set(part.labels.tolist()) == set(range(10))
        assert 0 <= part.images.min() < part.images.max() <= 1
        border = part.images.view(-1, 28, 28).clone()
        border[:, 4:24, 4:24] = 0
        assert not border.any()
    # Every image of the set is in exactly one part.
    both = torch.cat([digits.train.images, digits.test.images])
    assert len(torch.unique(both, dim=0)) == 1797


def test_hold_out_uses_the_last_training_images():
    digits = data.load("digits")
    held = digits.hold_out(37)
    assert (len(held.train), len(held.test)) == (1400, 37)
    assert torch.equal(held.test.images, digits.train.images[1400:])
    for count in (0, 1437, -1):
        with pytest.raises(ValueError, match="between 1 and 1436"):
            digits.hold_out(count)


@pytest.mark.parametrize("inside", [".", "mnist"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mnist_is_read_from_a_folder(tmp_path, inside, ending):
    files = small_mnist()
    zipped = {n + ending: gzip.compress(c) if ending else c for n, c in files.items()}
    write(tmp_path / inside, zipped)
    got = data.load("mnist", tmp_path)
    assert (len(got.train), len(got.test)) == (20, 8)
    pixels = np.frombuffer(files[TRAIN_IMAGES][16:], np.uint8).reshape(20, 784)
    assert np.array_equal((got.train.images * 255).round().numpy(), pixels)
    assert got.test.labels.tolist() == list(files[TEST_LABELS][8:])


def wrong(folder: Path, **changes: bytes | None) -> None:
    files = small_mnist()
    names = {"images": TRAIN_IMAGES, "labels": TRAIN_LABELS}
    for key, content in changes.items():
        del files[names[key]]
        if content is not None:
            files[names[key]] = content
    write(folder, files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, "expected train-images-idx3-ubyte or train-images-idx3-ubyte.gz"),
        ({"images": idx(np.zeros((20, 8, 8), np.uint8))}, "expected images of 28x28"),
        ({"labels": idx(np.zeros(19, np.uint8))}, "got 20 images"),
        ({"labels": idx(np.array([3] * 19 + [10], np.uint8))}, "got 10 at position 19"),
        ({"labels": idx(np.zeros((20, 1), np.uint8))}, "1 dimension"),
        (
            {"images": idx(np.zeros((0, 28, 28), np.uint8)), "labels": idx(np.zeros(0, np.uint8))},
            "at least one",
        ),
    ],
)
def test_wrong_files_raise(tmp_path, changes, message):
    wrong(tmp_path, **changes)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        data.load("mnist", tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_folder_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a folder with the fashion-mnist files"):
        data.load("fashion-mnist", tmp_path / "nowhere")


def test_unknown_name_raises():
    with pytest.raises(ValueError, match="digits, mnist, fashion-mnist, cifar-10, got 'cifar'"):
        data.load("cifar")


@pytest.fixture
def server(tmp_path):
    """Serve a folder over HTTP on this machine; yield (folder, address)."""
    folder = tmp_path / "served"
    folder.mkdir()
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder)

        def log_message(self, *args):
            requests.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_port}/", requests
        running.shutdown()
        thread.join()


def sha256(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def test_downloads_are_cached(tmp_path, server):
    folder, url, requests = server
    write(folder, {"a.gz": b"content"})
    for _ in range(2):
        got = fetch([url], "a.gz", sha256(b"content"), tmp_path / "cache")
        assert got.read_bytes() == b"content"
    assert len([r for r in requests if r == "/a.gz"]) == 1


def test_md5_checksums_and_the_second_mirror(tmp_path, server):
    folder, url, _ = server
    write(folder / "mirror", {"a.gz": b"content"})
    checksum = "md5:" + hashlib.md5(b"content").hexdigest()
    got = fetch([url, url + "mirror/"], "a.gz", checksum, tmp_path / "cache")
    assert got.read_bytes() == b"content"


def test_wrong_checksum_leaves_no_file(tmp_path, server):
    folder, url, _ = server
    write(folder, {"a.gz": b"other"})
    with pytest.raises(ValueError, match="expected the checksum sha256:") as error:
        fetch([url], "a.gz", sha256(b"content"), tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert not any((tmp_path / "cache").iterdir())


def test_damaged_file_in_the_cache_is_downloaded_again(tmp_path, server):
    folder, url, _ = server
    write(folder, {"a.gz": b"content"})
    write(tmp_path / "cache", {"a.gz": b"half"})
    got = fetch([url], "a.gz", sha256(b"content"), tmp_path / "cache")
    assert got.read_bytes() == b"content"


def test_pipe_in_the_cache_raises(tmp_path):
    os.mkfifo(tmp_path / "a.gz")
    with pytest.raises(OSError, match=r"a\.gz: expected a file, got a folder, pipe or device"):
        fetch([], "a.gz", sha256(b"content"), tmp_path)


def test_missing_file_on_the_server(tmp_path, server):
    with pytest.raises(OSError, match="the server answered 404"):
        fetch([server[1]], "a.gz", sha256(b""), tmp_path)


def test_no_connection_raises_one_line(tmp_path):
    with pytest.raises(OSError, match="cannot download") as error:
        fetch(["http://127.0.0.1:1/"], "a.gz", sha256(b""), tmp_path)
    assert "no connection" in str(error.value)
    assert "\n" not in str(error.value)


def test_mnist_downloads_its_four_files(tmp_path, server, monkeypatch):
    folder, url, _ = server
    zipped = {name + ".gz": gzip.compress(content) for name, content in small_mnist().items()}
    write(folder, zipped)
    checksums = {name[:-3]: sha256(content) for name, content in zipped.items()}
    monkeypatch.setitem(SOURCES, "mnist", Source((url,), checksums))
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    assert len(data.load("mnist").train) == 20
    assert {f.name for f in (tmp_path / "cache" / "mnist").iterdir()} == set(zipped)


@pytest.mark.skipif("DYNSPARSE_DATA_DIR" not in os.environ, reason="DYNSPARSE_DATA_DIR is not set")
def test_the_real_mnist():
    got = data.load("mnist", os.environ["DYNSPARSE_DATA_DIR"])
    assert (len(got.train), len(got.test)) == (60000, 10000)
    assert torch.bincount(got.test.labels).tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip
    assert got.train.images.mean().item() == pytest.approx(0.130660, abs=1e-6)
