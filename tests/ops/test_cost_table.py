"""Selection of the active cost table: a supplied one or a stored measurement."""

import json
import logging

import pytest
from kernel_times import AMX, ARM, AVX2, AVX512, ZEN_3, ZEN_4, ZEN_5, timings

from dynsparse._core import native
from dynsparse._core.processor import Processor, parse_cpuinfo
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import cost_table, tuning
from dynsparse.ops.linear.cost_table import FAMILIES, Cost, Table, family
from dynsparse.ops.linear.tuning import MANY

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("restore_cost_table"),
]


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """Use a temporary cache folder."""
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Measurements that are stored, and the active table.


def fast(monkeypatch):
    """Replace measurements by simulated times of another machine."""

    def told(cell, seconds):
        return timings(AMX.costs, [cell])

    monkeypatch.setattr("dynsparse.ops.linear.tuning.time_cell", told)
    monkeypatch.setattr("dynsparse.ops.linear.tuning.default_table", lambda: ZEN_4)
    monkeypatch.setattr(cost_table, "default_table", lambda: ZEN_4)


def test_measurement_is_active_in_the_next_process(warm, monkeypatch, caplog):
    fast(monkeypatch)
    before = cost_table.active_table()
    assert before == ZEN_4
    seen = []
    found = tuning.tune(on_progress=lambda done, cells: seen.append((done, cells)))
    assert found.enabled
    assert seen[-1][1] == len(MANY)
    assert len(list((warm / "kernel-costs").iterdir())) == 1
    assert cost_table.active_table() == before  # settled for this one
    cost_table._active = None
    with caplog.at_level(logging.INFO, "dynsparse"):
        now = cost_table.active_table()
    assert now.measured_here
    assert now.costs == found.costs
    assert "measured here on" in now.origin
    assert sum("chosen by the table" in one for one in caplog.messages) == 1
    assert cost_table.delete_measurement()
    assert not cost_table.delete_measurement()
    cost_table._active = None
    assert cost_table.active_table() == ZEN_4


def kept(monkeypatch, **changes):
    fast(monkeypatch)
    found = tuning.tune(quick=True)
    cost_table.save_measurement(found.__class__(**{**vars(found), **changes}))
    cost_table._active = None
    return found


@pytest.mark.parametrize(
    "other",
    [
        {"processor": "another"},
        {"version": "0.0.1"},
        {"torch": "1.0"},
        {"kernels": "0" * 64},
    ],
)
def test_measurement_is_ignored_on_another_processor_version_or_build(warm, monkeypatch, other):
    kept(monkeypatch, enabled=True)
    assert cost_table.active_table().measured_here
    here = cost_table.environment()
    monkeypatch.setattr(cost_table, "environment", lambda: here | other)
    cost_table._active = None
    assert cost_table.active_table() == ZEN_4
    assert cost_table.load_measurement() is None


def test_kernels_are_identified_by_hash(tmp_path, monkeypatch):
    def hash_of(content):
        (tmp_path / "kernels.so").write_bytes(content)
        cost_table._kernels_digest.cache_clear()
        return cost_table._kernels_digest()

    class Library:
        _name = str(tmp_path / "kernels.so")

    with monkeypatch.context() as patch:
        patch.setattr(native, "load", lambda: Library)
        assert hash_of(b"a") != hash_of(b"b")
    cost_table._kernels_digest.cache_clear()


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{}", b"3", b"null", b'{"costs": {}}', b'{"date": 1}', b"no json", b'{"costs": 1e9}'],
)
def test_invalid_file_is_ignored(warm, monkeypatch, caplog, content):
    kept(monkeypatch, enabled=True)
    (file,) = (warm / "kernel-costs").iterdir()
    file.write_bytes(content)
    with caplog.at_level(logging.INFO, "dynsparse"):
        assert cost_table.active_table() == ZEN_4
        cost_table.active_table()
    words = [one for one in caplog.messages if "cannot be read" in one]
    assert len(words) == 1


def test_costs_that_are_no_numbers_are_ignored(warm, monkeypatch):
    kept(monkeypatch, enabled=True)
    (file,) = (warm / "kernel-costs").iterdir()
    fields = json.loads(file.read_text())
    fields["costs"]["dense"][1][3] = None
    file.write_text(json.dumps(fields))
    assert cost_table.active_table() == ZEN_4


def test_unusable_measurement_is_not_active(warm, monkeypatch):
    kept(monkeypatch, enabled=False)
    assert cost_table.active_table() == ZEN_4
    assert cost_table.load_measurement() is not None


def test_unusable_measurement_keeps_the_earlier_one(warm, monkeypatch):
    first = kept(monkeypatch, enabled=True)
    before = cost_table.load_measurement()
    monkeypatch.setattr("dynsparse.ops.linear.tuning.MOST_ERROR", -1.0)
    second = tuning.tune(quick=True)
    assert not second.enabled
    assert second.reason.endswith(f"that of {first.date} stays in use")
    assert cost_table.load_measurement() == before


def test_ranks_use_the_supplied_table(warm, monkeypatch):
    kept(monkeypatch, enabled=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cost_table.active_table() == ZEN_4
    monkeypatch.setenv("WORLD_SIZE", "1")
    cost_table._active = None
    assert cost_table.active_table().measured_here


def test_unwritable_folder_warns(warm, monkeypatch):
    fast(monkeypatch)
    warm.write_text("in the way")
    with pytest.raises(ValueError, match="cannot be stored"):
        tuning.tune(quick=True)


def test_layers_use_the_active_table():
    dear = {n: tuple(c._replace(call=1e8) for c in both) for n, both in ZEN_4.costs.items()}

    def without(kind):
        name = family(kind, 1)
        return Table("t", "by hand", {**dear, name: (Cost(0, 0, 0, 0, 0, 0),) * 2})

    for kind in ("dense", "sparse", "dense"):
        cost_table._active = without(kind)
        layer = SparseLinear(256, 256, 0.4)
        assert layer.kernel(200) == layer.kernel(200, backward=True) == kind


# The supplied tables.


@pytest.mark.parametrize(
    ("maker", "family_", "flags", "wanted"),
    [
        ("GenuineIntel", 6, "avx2 avx512f amx_tile", AMX),
        ("GenuineIntel", 6, "avx2 avx512f", AVX512),
        ("GenuineIntel", 6, "avx2", AVX2),
        ("AuthenticAMD", 25, "avx2", ZEN_3),
        ("AuthenticAMD", 25, "avx2 avx512f", ZEN_4),
        ("AuthenticAMD", 26, "avx2 avx512f", ZEN_5),
        ("AuthenticAMD", 23, "avx2", ZEN_3),
        ("", 0, "", AVX2),
    ],
)
def test_every_machine_has_a_table(monkeypatch, maker, family_, flags, wanted):
    here = Processor(maker, "", family_, frozenset(flags.split()))
    monkeypatch.setattr(cost_table, "processor", lambda: here)
    monkeypatch.setattr(native, "supported_isas", lambda: ("v3",))
    assert cost_table.default_table() is wanted
    monkeypatch.setattr(native, "supported_isas", lambda: ("neon",))
    assert cost_table.default_table() is ARM


def test_tables_are_complete_and_name_their_source():
    for table in cost_table.TABLES:
        assert tuple(table.costs) == FAMILIES
        assert table.origin.startswith(("measured on ", "estimated: "))
        assert not table.measured_here
    assert len({table.name for table in cost_table.TABLES}) == len(cost_table.TABLES)


def test_processor_description():
    x86 = "vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 17\nmodel name : EPYC\nflags : a b\n"
    assert parse_cpuinfo(x86 + "\nmodel name : other\n") == Processor(
        "AuthenticAMD", "EPYC, family 25 model 17", 25, frozenset("ab")
    )
    arm = parse_cpuinfo("Features : fp asimd\nCPU implementer : 0x41\nCPU part : 0xd40\n")
    assert arm.name.endswith(", implementer 0x41 part 0xd40")
    assert (arm.maker, arm.family, arm.flags) == ("", 0, {"fp", "asimd"})
    assert parse_cpuinfo("").name
