"""`dynsparse tune`."""

import json

import pytest

from dynsparse import native
from dynsparse.cli.app import run as run_command
from dynsparse.ops.linear import in_force, measured
from dynsparse.ops.linear.tuning import run
from dynsparse.ops.linear.tuning.cells import Cell

pytestmark = pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built")


@pytest.fixture(autouse=True)
def _two_cells(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name in ("QUICK", "MANY"):
        monkeypatch.setattr(run, name, (Cell(32, 48, 1, 0.3, 4), Cell(32, 32, 4, 0.3, 4)))
    in_force._in_force = None
    yield
    in_force._in_force = None


def call(capsys, *arguments):
    status = run_command(list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err


def test_measures_keeps_and_forgets(capsys):
    status, out, _ = call(capsys, "tune", "--json")
    assert status == 0
    facts = json.loads(out)
    assert measured.from_plain(facts["costs"])
    assert measured.kept_measured().above == facts["above"]
    status, out, _ = call(capsys, "tune", "--quick")
    assert status == 0
    assert "over the best kind" in out
    assert "in force" in out
    status, out, _ = call(capsys, "tune", "--reset")
    assert (status, "removed what was measured" in out) == (0, True)
    assert measured.kept_measured() is None
    status, out, _ = call(capsys, "tune", "--reset", "--json")
    assert json.loads(out)["removed"] is False


def test_info_says_what_is_in_force(capsys):
    assert call(capsys, "tune", "--quick")[0] == 0
    kept = measured.kept_measured()
    for used in (True, False):
        measured.keep_measured(type(kept)(**{**vars(kept), "in_force": used}))
        in_force._in_force = None
        out = call(capsys, "info")[1]
        assert ("measured here on" in out) is used
        assert ("and not used" in " ".join(out.split())) is not used
        facts = json.loads(call(capsys, "info", "--json")[1])["kernel_costs"]
        assert facts["measured"] is used


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reset", "--quick"], "--reset measures nothing"),
    ],
)
def test_flags_that_make_no_sense(capsys, flags, words):
    status, _, err = call(capsys, "tune", *flags)
    assert status == 2
    assert words in err
