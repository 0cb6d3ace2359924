"""Cost constants of the kernels: measurement, fit and conclusion."""

import random

import pytest
import torch
from kernel_times import AMX, ZEN_4, timings

from dynsparse._core import native
from dynsparse.ops.linear import cost_table, tuning
from dynsparse.ops.linear.cost_table import FAMILIES, Layer, evaluate, family
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.ops.linear.tuning import MANY, QUICK, Cell, Timing, fit, mean_excess, time_cell

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("restore_cost_table"),
]


def furthest(one, other):
    """Return the largest ratio of costs by two sets of constants, at layers outside the fit."""
    factors = []
    for size, density, block, batch in [
        (512, 0.1, 1, 64), (512, 0.5, 1, 8), (768, 0.2, 4, 128), (1536, 0.05, 16, 256),
        (1024, 0.4, 32, 16), (384, 0.3, 8, 1), (2048, 0.3, 1, 4),
    ]:  # fmt: skip
        layer = Layer(size, size, round(density * (size // block) ** 2), block)
        for kind in cost_table.candidate_kinds(layer, batch):
            name = family(kind, block)
            for backward in (False, True):
                costs = [evaluate(c[name][backward], name, layer, batch) for c in (one, other)]
                factors.append(max(costs) / min(costs))
    return max(factors)


def test_fit_recovers_constants_from_exact_times():
    found = fit(timings(ZEN_4.costs), ZEN_4.costs)
    assert found.error < 1e-6
    for name in FAMILIES:
        for one, wanted in zip(found.costs[name], ZEN_4.costs[name], strict=True):
            assert one == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_fit_differs_from_the_table_on_another_machine():
    found = fit(timings(AMX.costs, speed=1.7), ZEN_4.costs)
    # Only the smallest number of samples that counts stays the table's.
    assert furthest(found.costs, fit(timings(AMX.costs, speed=1.7), AMX.costs).costs) < 1.5
    assert found.error < 0.1


def test_fit_is_robust_to_noise_and_outliers():
    chance = random.Random(0)

    def disturbed():
        noise = 1 + abs(chance.gauss(0, 0.15))
        return noise * (10 if chance.random() < 0.05 else 1)

    found = fit(timings(AMX.costs, spoil=disturbed), ZEN_4.costs)
    clean = fit(timings(AMX.costs), ZEN_4.costs)
    assert furthest(found.costs, clean.costs) < 1.5
    assert mean_excess(timings(AMX.costs), found.costs) < 0.02


def test_fitted_costs_stay_within_four_times_the_table():
    def absurd(one):
        return one.times | {k: t * (100 if k == "sparse" else 1) for k, t in one.times.items()}

    broken = [one._replace(times=absurd(one)) for one in timings(ZEN_4.costs)]
    found = fit(broken, ZEN_4.costs)
    speed = found.costs["dense"][0].sample / ZEN_4.costs["dense"][0].sample
    assert furthest(found.costs, ZEN_4.costs) < 4.5 * max(speed, 1 / speed)
    assert found.error > 0.5


def test_families_without_times_scale_the_table():
    some = [cell for cell in QUICK if cell.block_size == 1]
    found = fit(timings(ZEN_4.costs, some, speed=2), ZEN_4.costs)
    for name in ("sparse blocks", "sparse blocks of 16", "small blocks"):
        for one, before in zip(found.costs[name], ZEN_4.costs[name], strict=True):
            assert one.sample == pytest.approx(2 * before.sample, rel=1e-6)
            assert one.least_batch == before.least_batch
    with pytest.raises(ValueError, match="times of some layers"):
        fit([], ZEN_4.costs)


def test_regret_of_choices_by_hand():
    layer = Layer(1024, 1024, 100_000, 1)
    (slow,) = {"sparse", "small", "dense"} & {
        cost_table.cheapest_kind(ZEN_4.costs, layer, 512, False)
    }
    others = {k: 1.0 for k in ("sparse", "dense") if k != slow}
    assert mean_excess([Timing(layer, 512, False, {slow: 1.5, **others})], ZEN_4.costs) == 0.5
    assert mean_excess([], ZEN_4.costs) == 0.0


@pytest.mark.parametrize(
    ("true", "in_force_", "words"),
    [(ZEN_4, False, "chooses as well"), (AMX, True, "over the best kinds")],
)
def test_conclusion(true, in_force_, words):
    found = tuning.evaluate_timings(timings(true.costs), ZEN_4)
    assert words in found.reason
    assert found.enabled is in_force_


def test_inexplicable_times_are_rejected():
    chance = random.Random(1)
    spoiled = timings(AMX.costs, spoil=lambda: 10 ** chance.uniform(-1, 1))
    found = tuning.evaluate_timings(spoiled, ZEN_4)
    assert not found.enabled
    assert "measure again" in found.reason


def test_cells_are_timed_by_kind():
    cell = Cell(64, 48, 4, 0.3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        forward, backward = time_cell(cell, 0.0)
        assert torch.is_grad_enabled()
    assert not forward.backward
    assert backward.backward
    assert forward.layer == Layer(64, 48, 58, 4)
    assert set(forward.times) == {"sparse", "small", "dense"}
    assert all(0 < t < 1e9 for t in [*forward.times.values(), *backward.times.values()])


def test_measurement_uses_one_thread_and_restores(monkeypatch):
    seen = []
    sparse = KERNELS["sparse"]
    counting = sparse._replace(forward=lambda *_: seen.append(torch.get_num_threads()))
    monkeypatch.setitem(KERNELS, "sparse", counting)
    torch.set_num_threads(3)
    time_cell(Cell(32, 32, 1, 0.5, 2), 0.0)
    assert torch.get_num_threads() == 3
    monkeypatch.setitem(KERNELS, "sparse", sparse._replace(forward=None))
    with pytest.raises(TypeError):
        time_cell(Cell(32, 32, 1, 0.5, 2), 0.0)
    assert torch.get_num_threads() == 3
    assert seen == [1] * (1 + tuning._LEAST_TIMINGS)


def test_measurement_keeps_the_random_state():
    before = torch.get_rng_state()
    time_cell(Cell(32, 32, 1, 0.5, 2), 0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_cells_cover_every_family_in_both_halves():
    for cells in (QUICK, MANY):
        for half in (cells, cells[::2], cells[1::2]):
            names = {family("sparse", cell.block_size) for cell in half}
            assert names == {"sparse elements", "sparse blocks", "sparse blocks of 16"}
            assert {cell.batch <= cost_table.MOST_SAMPLES for cell in half} == {True, False}
        assert len(set(cells)) == len(cells)
