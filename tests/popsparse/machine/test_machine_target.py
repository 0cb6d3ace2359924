import numpy as np
import pytest
import torch

from popsparse.machine import FLOAT, HALF, INT, Target, as_dtype


def test_presets():
    mk2, bow = Target.mk2(), Target.bow()
    for target in (mk2, bow):
        assert (target.tiles, target.bytes_per_tile, target.workers) == (1472, 638_976, 6)
        assert target.exchange_bytes_per_cycle == 4
        assert (target.vector_width(HALF), target.vector_width(FLOAT)) == (4, 2)
    assert (mk2.clock_hz, bow.clock_hz) == (1.33e9, 1.85e9)
    assert bow.seconds(1.85e9) == 1
    assert Target.named("bow", tiles=4) == Target.bow(tiles=4)
    assert mk2.with_(tiles=8).tiles == 8
    assert mk2.to_dict()["workers"] == 6


def test_published_peaks_follow_from_the_constants():
    mk2 = Target.mk2()
    per_unit = {HALF: 4, FLOAT: 1}  # multiply-accumulates a cycle
    half = 2 * mk2.tiles * mk2.conv_units(HALF, HALF) * per_unit[HALF] * mk2.clock_hz
    single = 2 * mk2.tiles * mk2.conv_units(FLOAT, FLOAT) * per_unit[FLOAT] * mk2.clock_hz
    assert half == pytest.approx(250e12, rel=0.005)
    assert single == pytest.approx(62.5e12, rel=0.005)
    assert mk2.conv_units("half", "float") == 8


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tiles": 0}, ValueError, "tiles must be an integer of at least 1, got 0"),
        ({"tiles": 2.5}, TypeError, "tiles must be an integer, got 2.5"),
        ({"tiles": True}, ValueError, "tiles must be an integer"),
        ({"workers": -1}, ValueError, "workers"),
        ({"clock_hz": 0}, ValueError, r"clock_hz must be a number in \(0, inf\), got 0"),
        ({"clock_hz": float("nan")}, ValueError, "clock_hz"),
        ({"sync_cycles": -1}, ValueError, r"sync_cycles must be a number in \[0, inf\)"),
        ({"sync_cycles": "fast"}, TypeError, "sync_cycles must be a number"),
        ({"data_path_bits": 48}, ValueError, "multiple of 32"),
        ({"exchange_bus_tiles": 3}, ValueError, "exchange_bus_tiles must be at most 2, got 3"),
    ],
)
def test_bad_fields(change, error, message):
    with pytest.raises(error, match=message):
        Target(**change)


def test_bad_names():
    with pytest.raises(ValueError, match="mk2, bow, got 'mk3'"):
        Target.named("mk3")
    with pytest.raises(ValueError, match="matrix units"):
        Target.mk2().conv_units(FLOAT, HALF)


@pytest.mark.parametrize("name", ["half", "float16", np.float16, np.dtype("f2"), torch.float16])
def test_dtype_names(name):
    assert as_dtype(name) is HALF


def test_dtypes():
    assert [as_dtype(n).size for n in ("bool", "unsigned short", "int", "float")] == [1, 2, 4, 4]
    assert as_dtype(np.int32) is INT
    for bad in ("double", np.float64, object, None):
        with pytest.raises(TypeError, match="expected an element type"):
            as_dtype(bad)
