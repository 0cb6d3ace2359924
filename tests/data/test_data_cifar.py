"""CIFAR-10 files: folders, archives, damaged files, the cache."""

import hashlib
import io
import os
import tarfile

import numpy as np
import pytest
import torch

from dynsparse import data
from dynsparse.data import images
from dynsparse.data.images import CIFAR_ARCHIVE

TRAIN = [f"data_batch_{number}.bin" for number in range(1, 6)]
INSIDE = "cifar-10-batches-bin"


def records(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
    found[:, 0] = rng.integers(0, 10, count)
    return found


def small() -> dict[str, np.ndarray]:
    return {name: records(4 + seed, seed) for seed, name in enumerate([*TRAIN, "test_batch.bin"])}


def archive(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, content in {"batches.meta.txt": b"airplane\n", **files}.items():
            member = tarfile.TarInfo(f"{INSIDE}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def contents(**changes) -> dict[str, bytes]:
    files = {name: found.tobytes() for name, found in small().items()}
    for name, content in changes.items():
        files[f"{name}.bin"] = content
    return {name: content for name, content in files.items() if content is not None}


def check(got: data.DataSet) -> None:
    files = small()
    expected = np.concatenate([files[name] for name in TRAIN])
    assert got.name == "cifar-10"
    assert got.train.images.dtype == torch.uint8
    assert np.array_equal(got.train.images.numpy(), expected[:, 1:])
    assert got.train.labels.tolist() == expected[:, 0].tolist()
    assert np.array_equal(got.test.images.numpy(), files["test_batch.bin"][:, 1:])


@pytest.mark.parametrize("inside", [".", INSIDE])
def test_folder(tmp_path, inside):
    (tmp_path / inside).mkdir(exist_ok=True)
    for name, content in contents().items():
        (tmp_path / inside / name).write_bytes(content)
    check(data.load("cifar-10", tmp_path))


def test_archive(tmp_path):
    (tmp_path / CIFAR_ARCHIVE).write_bytes(archive(contents()))
    check(data.load("cifar-10", tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == [CIFAR_ARCHIVE]


WRONG_LABEL = records(3, 0)
WRONG_LABEL[1, 0] = 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_batch_3": b""}, "expected 1 to 10,000 records of 3073 bytes, got 0 bytes"),
        ({"test_batch": b"x" * 3074}, "got 3,074 bytes"),
        ({"data_batch_1": bytes(3073 * 10_001)}, "got more"),
        ({"data_batch_2": WRONG_LABEL.tobytes()}, "expected labels below 10, got 10 at position 1"),
        ({"data_batch_5": None}, "data_batch_5.bin"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_files_raise(tmp_path, changes, message, packed):
    if packed:
        (tmp_path / CIFAR_ARCHIVE).write_bytes(archive(contents(**changes)))
    else:
        for name, content in contents(**changes).items():
            (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        data.load("cifar-10", tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_pipe_among_the_files_raises(tmp_path):
    for name, content in contents().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "data_batch_3.bin").unlink()
    os.mkfifo(tmp_path / "data_batch_3.bin")
    with pytest.raises(OSError, match=r"data_batch_3\.bin: expected a file"):
        data.load("cifar-10", tmp_path)


def test_damaged_archives_raise(tmp_path):
    whole = archive(contents())
    for content in (b"", b"nothing of the kind", whole[:100], whole[: len(whole) // 2]):
        (tmp_path / CIFAR_ARCHIVE).write_bytes(content)
        with pytest.raises(ValueError, match="get the file again") as error:
            data.load("cifar-10", tmp_path)
        assert "\n" not in str(error.value)


def test_link_in_an_archive_is_not_followed(tmp_path):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name in [*TRAIN, "test_batch.bin"]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(member)
    (tmp_path / CIFAR_ARCHIVE).write_bytes(made.getvalue())
    with pytest.raises(ValueError, match=r"expected data_batch_1\.bin in it, got none"):
        data.load("cifar-10", tmp_path)


def test_empty_and_missing_folders_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match="got neither"):
        data.load("cifar-10", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected a folder with cifar-10-binary\.tar\.gz"):
        data.load("cifar-10", tmp_path / "nowhere")


def test_read_from_the_cache(tmp_path, monkeypatch):
    """Downloads are tested in test_data_sets.py."""
    content = archive(contents())
    (tmp_path / "cifar-10").mkdir()
    (tmp_path / "cifar-10" / CIFAR_ARCHIVE).write_bytes(content)
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(images, "CIFAR_CHECKSUM", "md5:" + hashlib.md5(content).hexdigest())
    check(data.load("cifar-10"))
