"""Records: header, telemetry, archives, and arrays within a valid archive."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np

from dynsparse.training.records import RecordError, Records
from targets.common import folder, refused_as

_END = b"|next|"
_WAYS = 6
_HEAD = json.dumps(
    {
        "format": "dynsparse-record",
        "version": 1,
        "layers": {"a": {"shape": [6, 8], "block_size": 2}},
        "metadata": {"seed": 0, "pixel_permutation": [0, 1]},
    }
).encode()


def _array(values: object, dtype: str) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(values, dtype))
    return stream.getvalue()


def _archive(members: dict[str, bytes], deflated: bool = False) -> bytes:
    stream = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content, kind)
    return stream.getvalue()


_FIRST = {"step": _array(0, "i8"), "positions/a": _array([0, 3, 5, 7], "i4")}
_UPDATE = {"step": _array(9, "i8"), "dropped/a": _array([3], "i4"), "grown/a": _array([4], "i4")}

SEEDS = [
    b"\0" + _HEAD,
    b'\1{"step": 3, "loss": 0.5}\n{"step": 4}\n{"st',
    b"\2" + _archive(_FIRST),
    b"\2" + _archive(_FIRST, True),
    *(b"\3" + _END.join(_FIRST.values()) for _ in range(1)),
    b"\4" + _END.join(_FIRST.values()),
    b"\5" + _END.join(_UPDATE.values()),
    b"\5" + _END.join([_array(2**63, "u8"), _array([], "i8"), _array([[1]], "f4")]),
]


def run(data: bytes) -> None:
    way, content = data[0] % _WAYS if data else 0, data[1:]
    head, telemetry = _HEAD, b""
    first, update = _archive(_FIRST), _archive(_UPDATE)
    if way == 0:
        head = content
    elif way == 1:
        telemetry = content
    elif way == 2:
        first = content
    elif way < 5:
        parts = content.split(_END)
        first = _archive(dict(zip(_FIRST, parts, strict=False)), deflated=way == 4)
    else:
        parts = content.split(_END)
        update = _archive(dict(zip(_UPDATE, parts, strict=False)), deflated=True)
    place = folder() / "record"
    place.mkdir(exist_ok=True)
    (place / "record.json").write_bytes(head)
    (place / "telemetry.jsonl").write_bytes(telemetry)
    (place / "update-000000.npz").write_bytes(first)
    (place / "update-000001.npz").write_bytes(update)
    with refused_as(RecordError):
        records = Records.load(place)
        for name, layer in list(records.layers.items())[:4]:
            for _, pattern in records.patterns(name):
                assert pattern.nnz <= layer.total
            assert len(records.churn(name)) == len(records) - 1
            assert (np.diff(records.exploration(name)) >= 0).all()
            dead = records.dead_units(name)
            assert (dead.inputs <= layer.shape[1]).all()
            assert (dead.outputs <= layer.shape[0]).all()
