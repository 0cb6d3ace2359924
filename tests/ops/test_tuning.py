"""Constants of the kernels' costs: fitted to times, kept, and in force or not."""

import json
import logging
import random

import pytest
import torch

from dynsparse import native
from dynsparse.files.cache import Cache, open_cache
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import choice, in_force, measured, tables, tuning
from dynsparse.ops.linear.costs import FAMILIES, Cost, Layer, Table, evaluate, family
from dynsparse.ops.linear.kernels import sparse
from dynsparse.ops.linear.tuning.cells import MANY, QUICK, Cell, Timing, rounds
from dynsparse.ops.linear.tuning.fit import above_best, fit
from dynsparse.processor import Processor, parse

pytestmark = pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built")

AMX, AVX512, AVX2, ZEN_3, ZEN_4, ZEN_5, ARM = tables.TABLES


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    choice.put_in_force(None)
    yield
    choice.put_in_force(None)


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DYNSPARSE_CACHE_SIZE", str(1 << 20))
    return tmp_path / "cache"


def timings(costs, cells=MANY, speed=1.0, spoil=None):
    """What a machine with these constants would take."""
    found = []
    for out, in_, block, density, batch in cells:
        layer = Layer(out, in_, round(density * out * in_ / block**2), block)
        kinds = {*choice.candidates(layer, batch), "dense"}
        for backward in (False, True):
            times = {}
            for kind in sorted(kinds):
                name = family(kind, block)
                time = speed * evaluate(costs[name][backward], name, layer, batch)
                times[kind] = time if spoil is None else time * spoil()
            found.append(Timing(layer, batch, backward, times))
    return found


def furthest(one, other):
    """The largest factor between costs by two sets of constants, at layers that were not fitted."""
    factors = []
    for size, density, block, batch in [
        (512, 0.1, 1, 64), (512, 0.5, 1, 8), (768, 0.2, 4, 128), (1536, 0.05, 16, 256),
        (1024, 0.4, 32, 16), (384, 0.3, 8, 1), (2048, 0.3, 1, 4),
    ]:  # fmt: skip
        layer = Layer(size, size, round(density * (size // block) ** 2), block)
        for kind in choice.candidates(layer, batch):
            name = family(kind, block)
            for backward in (False, True):
                costs = [evaluate(c[name][backward], name, layer, batch) for c in (one, other)]
                factors.append(max(costs) / min(costs))
    return max(factors)


def test_exact_times_give_back_the_constants_behind_them():
    found = fit(timings(ZEN_4.costs), ZEN_4.costs)
    assert found.error < 1e-6
    for name in FAMILIES:
        for one, wanted in zip(found.costs[name], ZEN_4.costs[name], strict=True):
            assert one == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_times_of_another_machine_lead_away_from_the_table():
    found = fit(timings(AMX.costs, speed=1.7), ZEN_4.costs)
    # Only the smallest number of samples that counts stays the table's.
    assert furthest(found.costs, fit(timings(AMX.costs, speed=1.7), AMX.costs).costs) < 1.5
    assert found.error < 0.1


def test_noise_and_outliers_spoil_little():
    chance = random.Random(0)

    def disturbed():
        noise = 1 + abs(chance.gauss(0, 0.15))
        return noise * (10 if chance.random() < 0.05 else 1)

    found = fit(timings(AMX.costs, spoil=disturbed), ZEN_4.costs)
    clean = fit(timings(AMX.costs), ZEN_4.costs)
    assert furthest(found.costs, clean.costs) < 1.5
    assert above_best(timings(AMX.costs), found.costs) < 0.02


def test_no_cost_goes_further_than_four_times_from_the_table():
    def absurd(one):
        return one.times | {k: t * (100 if k == "sparse" else 1) for k, t in one.times.items()}

    broken = [one._replace(times=absurd(one)) for one in timings(ZEN_4.costs)]
    found = fit(broken, ZEN_4.costs)
    speed = found.costs["dense"][0].sample / ZEN_4.costs["dense"][0].sample
    assert furthest(found.costs, ZEN_4.costs) < 4.5 * max(speed, 1 / speed)
    assert found.error > 0.5


def test_families_without_times_keep_the_tables_constants_at_this_machines_speed():
    some = [cell for cell in QUICK if cell.block_size == 1]
    found = fit(timings(ZEN_4.costs, some, speed=2), ZEN_4.costs)
    for name in ("sparse blocks", "sparse blocks of 16", "small blocks"):
        for one, before in zip(found.costs[name], ZEN_4.costs[name], strict=True):
            assert one.sample == pytest.approx(2 * before.sample, rel=1e-6)
            assert one.least_batch == before.least_batch
    with pytest.raises(ValueError, match="times of some layers"):
        fit([], ZEN_4.costs)


def test_how_far_a_choice_is_from_the_best_by_hand():
    layer = Layer(1024, 1024, 100_000, 1)
    (slow,) = {"sparse", "small", "dense"} & {choice.cheapest(ZEN_4.costs, layer, 512, False)}
    others = {k: 1.0 for k in ("sparse", "dense") if k != slow}
    assert above_best([Timing(layer, 512, False, {slow: 1.5, **others})], ZEN_4.costs) == 0.5
    assert above_best([], ZEN_4.costs) == 0.0


@pytest.mark.parametrize(
    ("true", "asked", "in_force_", "words"),
    [
        (ZEN_4, True, False, "chooses as well"),
        (AMX, True, True, "over the best kinds"),
        (AMX, False, None, ""),
    ],
)
def test_what_is_concluded(true, asked, in_force_, words):
    found = tuning.conclude(timings(true.costs), ZEN_4, asked)
    assert found.asked is asked
    assert words in found.because
    if in_force_ is None:  # unasked only where more than 5 % are lost, and half of it is gained
        shipped, measured = found.above["shipped"], found.above["measured"]
        in_force_ = shipped > 0.05 and measured <= shipped / 2
    assert found.in_force is in_force_


def test_times_that_nothing_explains_are_not_used():
    chance = random.Random(1)
    spoiled = timings(AMX.costs, spoil=lambda: 10 ** chance.uniform(-1, 1))
    found = tuning.conclude(spoiled, ZEN_4, asked=True)
    assert not found.in_force
    assert "measure again" in found.because


def test_cells_are_timed_kind_by_kind():
    cell = Cell(64, 48, 4, 0.3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        made, warmed, *times = rounds(cell, 3)
        assert torch.is_grad_enabled()
    assert (made, warmed, len(times)) == ([], [], 3)
    for forward, backward in times:
        assert not forward.backward
        assert backward.backward
        assert forward.layer == Layer(64, 48, 58, 4)
        assert set(forward.times) == {"sparse", "small", "dense"}
        assert all(0 < t < 1e9 for t in [*forward.times.values(), *backward.times.values()])
    (first, _), *_, (last, _) = times
    assert all(last.times[kind] <= first.times[kind] for kind in last.times)


def test_measuring_takes_one_thread_and_gives_the_others_back(monkeypatch):
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(sparse, "forward", lambda *_: seen.append(torch.get_num_threads()))
    try:
        torch.set_num_threads(3)
        for _ in rounds(Cell(32, 32, 1, 0.5, 2), 2):
            assert torch.get_num_threads() == 3
        monkeypatch.setattr(sparse, "forward", None)
        with pytest.raises(TypeError):
            list(rounds(Cell(32, 32, 1, 0.5, 2), 2))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 1]


def test_measuring_draws_no_random_numbers_of_the_training():
    before = torch.get_rng_state()
    list(rounds(Cell(32, 32, 1, 0.5, 2), 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_cells_reach_every_family_in_both_halves():
    for cells in (QUICK, MANY):
        for half in (cells, cells[::2], cells[1::2]):
            names = {family("sparse", cell.block_size) for cell in half}
            assert names == {"sparse elements", "sparse blocks", "sparse blocks of 16"}
            assert {cell.batch <= choice.MOST_SAMPLES for cell in half} == {True, False}
        assert len(set(cells)) == len(cells)


# What is kept, and what is in force.


def fast(monkeypatch):
    """Cells of nothing, timed as on the other machine."""

    def told(cell, most):
        yield from ([], [], timings(AMX.costs, [cell]))

    monkeypatch.setattr("dynsparse.ops.linear.tuning.run.rounds", told)
    monkeypatch.setattr("dynsparse.ops.linear.tuning.run.shipped", lambda: ZEN_4)
    monkeypatch.setattr(in_force, "shipped", lambda: ZEN_4)


def test_what_was_measured_is_in_force_in_the_next_process(warm, monkeypatch, caplog):
    fast(monkeypatch)
    before = in_force.table()
    assert before == ZEN_4
    seen = []
    found = tuning.tune(tell=lambda done, cells: seen.append((done, cells)))
    assert found.in_force
    assert seen[-1][1] == len(MANY)
    assert open_cache().kinds()["kernel-costs"].entries == 1
    assert in_force.table() == before  # settled for this one
    choice.put_in_force(None)
    with caplog.at_level(logging.INFO, "dynsparse"):
        now = in_force.table()
    assert now.measured_here
    assert now.costs == found.costs
    assert "measured here on" in now.origin
    assert sum("chosen by the table" in one for one in caplog.messages) == 1
    assert measured.forget_measured()
    assert not measured.forget_measured()
    choice.put_in_force(None)
    assert in_force.table() == ZEN_4


def kept(monkeypatch, **changes):
    fast(monkeypatch)
    found = tuning.tune(quick=True)
    measured.keep_measured(found.__class__(**{**vars(found), **changes}))
    choice.put_in_force(None)
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
def test_another_processor_version_or_build_is_measured_anew(warm, monkeypatch, other):
    kept(monkeypatch, in_force=True)
    assert in_force.table().measured_here
    here = measured.here()
    monkeypatch.setattr(measured, "here", lambda: here | other)
    choice.put_in_force(None)
    assert in_force.table() == ZEN_4
    assert measured.kept_measured() is None


def test_the_kernels_are_told_apart_by_their_bytes(tmp_path, monkeypatch):
    def hash_of(content):
        (tmp_path / "kernels.so").write_bytes(content)
        measured._kernels.cache_clear()
        return measured._kernels()

    class Library:
        _name = str(tmp_path / "kernels.so")

    with monkeypatch.context() as patch:
        patch.setattr(native, "load", lambda: Library)
        assert hash_of(b"a") != hash_of(b"b")
    measured._kernels.cache_clear()


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{}", b"3", b"null", b'{"costs": {}}', b'{"date": 1}', b"no json", b'{"costs": 1e9}'],
)
def test_an_entry_that_is_no_measurement_is_left_out(warm, monkeypatch, caplog, content):
    kept(monkeypatch, in_force=True)
    monkeypatch.setattr(Cache, "get", lambda *_: content)
    with caplog.at_level(logging.INFO, "dynsparse"):
        assert in_force.table() == ZEN_4
        in_force.table()
    words = [one for one in caplog.messages if "cannot be read" in one]
    assert len(words) == (content != b"null")


def test_a_damaged_entry_is_left_out(warm, monkeypatch):
    kept(monkeypatch, in_force=True)
    (file,) = (open_cache().folder / "kernel-costs").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert in_force.table() == ZEN_4


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 1e10, "1", None, True])
def test_constants_that_cannot_be_are_refused(wrong):
    plain = measured.to_plain(ZEN_4.costs)
    assert measured.from_plain(json.loads(json.dumps(plain))) == ZEN_4.costs
    plain["dense"][1][3] = wrong
    with pytest.raises(ValueError, match="expected costs of 6 families"):
        measured.from_plain(plain)


def test_what_is_not_to_be_used_is_not(warm, monkeypatch):
    kept(monkeypatch, in_force=False)
    assert in_force.table() == ZEN_4
    assert measured.kept_measured() is not None


@pytest.mark.parametrize(("variable", "used"), [("off", False), ("load", True), (" AUTO ", True)])
def test_the_environment_says_whether_it_is_used(warm, monkeypatch, variable, used):
    kept(monkeypatch, in_force=True)
    monkeypatch.setenv("DYNSPARSE_TUNE", variable)
    assert in_force.table().measured_here is used


def test_an_unknown_word_of_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("DYNSPARSE_TUNE", "yes")
    with pytest.raises(ValueError, match="DYNSPARSE_TUNE: expected auto, load, off, got 'yes'"):
        in_force.table()


def test_ranks_compute_with_what_came_with_the_library(warm, monkeypatch):
    kept(monkeypatch, in_force=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert in_force.table() == ZEN_4
    monkeypatch.setenv("WORLD_SIZE", "1")
    choice.put_in_force(None)
    assert in_force.table().measured_here


def test_without_a_cache_nothing_is_measured(monkeypatch):
    with pytest.raises(ValueError, match="nothing is measured: the cache is off"):
        tuning.tune()


def test_a_folder_that_cannot_be_written_is_told(warm, monkeypatch):
    fast(monkeypatch)
    warm.write_text("in the way")
    with pytest.raises(ValueError, match="cannot be kept"):
        tuning.tune(quick=True)


def test_another_table_changes_what_layers_remember():
    layer = SparseLinear(256, 256, 0.4)
    dear = {n: tuple(c._replace(call=1e8) for c in both) for n, both in ZEN_4.costs.items()}

    def without(kind):
        name = family(kind, 1)
        return Table("t", "by hand", {**dear, name: (Cost(0, 0, 0, 0, 0, 0),) * 2})

    for kind in ("dense", "sparse", "dense"):
        choice.put_in_force(without(kind))
        assert layer.kernel(200) == layer.kernel(200, backward=True) == kind


# The tables that come along.


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
    monkeypatch.setattr(tables, "processor", lambda: here)
    monkeypatch.setattr(native, "supported_isas", lambda: ("v3",))
    assert tables.shipped() is wanted
    monkeypatch.setattr(native, "supported_isas", lambda: ("neon",))
    assert tables.shipped() is ARM


def test_tables_are_whole_and_say_where_they_come_from():
    for table in tables.TABLES:
        assert tuple(table.costs) == FAMILIES
        assert table.origin.startswith(("measured on ", "estimated: "))
        assert not table.measured_here
        assert measured.from_plain(measured.to_plain(table.costs)) == table.costs
    assert len({table.name for table in tables.TABLES}) == len(tables.TABLES)


def test_processors_as_systems_tell_of_them():
    x86 = "vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 17\nmodel name : EPYC\nflags : a b\n"
    assert parse(x86 + "\nmodel name : other\n") == Processor(
        "AuthenticAMD", "EPYC, family 25 model 17", 25, frozenset("ab")
    )
    arm = parse("Features : fp asimd\nCPU implementer : 0x41\nCPU part : 0xd40\n")
    assert arm.name.endswith(", implementer 0x41 part 0xd40")
    assert (arm.maker, arm.family, arm.flags) == ("", 0, {"fp", "asimd"})
    assert parse("").name


def test_a_measurement_that_is_not_to_be_used_leaves_an_earlier_one(warm, monkeypatch):
    first = kept(monkeypatch, in_force=True)
    before = measured.kept_measured()
    monkeypatch.setattr("dynsparse.ops.linear.tuning.run.MOST_ERROR", -1.0)
    second = tuning.tune(quick=True)
    assert not second.in_force
    assert second.because.endswith(f"that of {first.date} stays in force")
    assert measured.kept_measured() == before
