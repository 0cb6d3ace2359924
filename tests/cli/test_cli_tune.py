"""`dynsparse tune`."""

import json

import pytest

from dynsparse._core import native
from dynsparse.cli.app import run as run_command
from dynsparse.ops.linear import cost_table, tuning
from dynsparse.ops.linear.tuning import Cell

pytestmark = pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built")


@pytest.fixture(autouse=True)
def _two_cells(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name in ("QUICK", "MANY"):
        monkeypatch.setattr(tuning, name, (Cell(32, 48, 1, 0.3, 4), Cell(32, 32, 4, 0.3, 4)))
    cost_table._active = None
    yield
    cost_table._active = None


def call(capsys, *arguments):
    status = run_command(list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err


def test_measures_stores_and_deletes(capsys):
    status, out, _ = call(capsys, "tune", "--json")
    assert status == 0
    facts = json.loads(out)
    assert set(facts["costs"]) == set(cost_table.FAMILIES)
    assert cost_table.load_measurement().excess == facts["excess"]
    status, out, _ = call(capsys, "tune", "--quick")
    assert status == 0
    assert "time lost to wrong choices" in out
    assert "takes effect" in out
    status, out, _ = call(capsys, "tune", "--reset")
    assert (status, "removed what was measured" in out) == (0, True)
    assert cost_table.load_measurement() is None
    status, out, _ = call(capsys, "tune", "--reset", "--json")
    assert json.loads(out)["removed"] is False


def test_info_shows_the_active_table(capsys):
    assert call(capsys, "tune", "--quick")[0] == 0
    kept = cost_table.load_measurement()
    for used in (True, False):
        cost_table.save_measurement(type(kept)(**{**vars(kept), "enabled": used}))
        cost_table._active = None
        out = call(capsys, "info")[1]
        assert ("measured here on" in out) is used
        assert ("and not used" in " ".join(out.split())) is not used
        facts = json.loads(call(capsys, "info", "--json")[1])["kernel_costs"]
        assert facts["measured"] is used


def test_reset_measures_nothing(capsys):
    status, _, err = call(capsys, "tune", "--reset", "--quick")
    assert (status, "--reset measures nothing" in err) == (2, True)
