"""Data-parallel training over processes equals training in one process with all samples."""

from __future__ import annotations

import data_parallel as work
import pytest
import torch
from processes import on_ranks
from rank_trainings import ALGORITHMS, apart

import dynsparse as ds
from dynsparse._core import native


def are_all_equal(found):
    """Return whether patterns are equal after each step, and weights up to rounding."""
    return all(same and difference <= 1e-10 for same, difference in found)


def check(size, names, steps):
    results = on_ranks(size, work.compare_algorithms, list(names), steps)
    for name in names:
        found = [result[name] for result in results]
        assert {same for same, _, _ in found} == {steps}, name
        assert max(difference for _, difference, _ in found) <= 1e-10, name
        for _, _, bits in found[1:]:
            assert all(torch.equal(bits[layer], found[0][2][layer]) for layer in bits), name


@pytest.mark.quick
def test_two_ranks_equal_one_process():
    check(2, ALGORITHMS, 6)


@pytest.mark.slow
def test_four_ranks_equal_one_process():
    check(4, ALGORITHMS, 8)


def test_convolutions_equal_one_process():
    for found in on_ranks(2, work.compare_convolutions, 6):
        assert len(found) == 6
        assert are_all_equal(found)


def test_wrapper_options_equal_one_process():
    for found in on_ranks(2, work.compare_wrappers):
        for name, steps in found.items():
            assert are_all_equal(steps), name


def test_communication_hooks_survive_changes_of_size():
    for calls, sizes in on_ranks(2, work.count_hook_calls):
        assert set(calls) == {1}
        assert sizes[0] < 77


def test_different_seeds_are_synchronized():
    one, other = on_ranks(2, work.train_from_different_seeds)
    for a, b in zip(one, other, strict=True):
        assert apart(a, b) == (True, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_model_equals_one_process(inside):
    for found in on_ranks(2, work.compare_compiled, inside):
        assert are_all_equal(found)


def test_all_ranks_raise_the_fault_of_one_rank():
    lines, other = on_ranks(2, work.run_faults)
    # Trainings that do not know of each other.
    assert (lines.pop("alone"), other.pop("alone")) == ("2", "3")
    assert other == lines
    diverged = "and this step ends in a pattern update, which would rank by it: the training has"
    assert lines["nan"] == (
        f"ValueError: rank 1: layer '2': dY holds NaN or infinity, {diverged} diverged, or the "
        "loss is scaled too far"
    )
    assert lines["weights"] == (
        "ValueError: rank 1: layer '0': drop scores hold NaN, so blocks cannot be ranked: the "
        "training diverged"
    )
    assert lines["budget"].startswith("ValueError: ranks disagree on the options: rank 0 differs")
    assert lines["pattern"].startswith("ValueError: ranks disagree on the pattern of layer '2' ")
    assert lines["steps"].startswith(
        "ValueError: ranks disagree on the step that ends in an update: rank 0: 3, rank 1: 6; "
    )
    assert lines["gradients"].startswith("RuntimeError: layer '0': rank 0 and rank 1 have other ")
    assert lines["dtype"].startswith(
        "ValueError: ranks disagree on layer '0' (and 1 more): rank 0: "
    )


def test_layer_unused_on_one_rank_stays_synchronized():
    (updates, one), (again, other) = on_ranks(2, work.skip_a_layer_on_one_rank)
    assert updates == again == 2
    assert apart(one, other) == (True, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rigl", "topkast"])
def test_different_instruction_sets_grow_the_same_positions(name):
    isas = [isa for isa in native.supported_isas() if native.describe()["backend"] == "native"]
    if len(isas) < 2:
        pytest.skip("this machine runs one instruction set")
    first, second = on_ranks(2, work.instructions, name, 30, [isas[-1], isas[0]])
    assert (first[0], second[0]) == (isas[-1], isas[0])
    assert first[1] == second[1] == 30
    assert all(torch.equal(first[2][layer], second[2][layer]) for layer in first[2])


def test_skipped_step_names_the_missing_rank():
    """The missing rank is in its next backward pass, which fails once the others end."""
    line = "not all ranks came in time: step 3 of this rank ends in an update; call trainer"
    with pytest.raises(AssertionError, match=f"{line}.*Ranks 1 failed.* 2000 ms"):
        on_ranks(2, work.skip_a_step_on_one_rank)


def test_trainer_sends_less_than_the_dense_gradient():
    """Traffic relative to a float32 all-reduce of the dense gradient, for which a rank sends
    2 (R - 1) / R times its size. Only the trainer's own traffic is counted: none in steps without
    an update."""
    dense = 4 * 1024**2
    for found in on_ranks(2, work.measure_trainer_traffic):
        for name, most in (("gradients", 0.56), ("samples", 0.2)):
            *others, update = found[name]
            assert others == [0, 0, 0]
            assert 0 < update <= most * dense, (name, update / dense)


def test_power_sgd_with_changing_numbers_of_values():
    options = {"final_density": 0.1}
    for seen, finite in on_ranks(2, work.train_with_power_sgd, ds.GMP, options):
        assert len({nnz for nnz, _ in seen}) > 3
        assert finite


def test_power_sgd_forgets_errors_of_dropped_weights():
    for seen, finite in on_ranks(2, work.train_with_power_sgd, ds.RigL, {}):
        kept = [step for step, (_, kept) in enumerate(seen, 1) if kept]
        assert kept == [4, 5, *range(7, 13)]  # updates at steps 3 and 6
        assert finite


def test_wrapper_reduces_only_gradients_of_values():
    """DistributedDataParallel reduces the gradients of the values and nothing else."""
    for sent, values, dense, buffers in on_ranks(2, work.measure_wrapper_traffic):
        assert buffers == 0
        assert all(0.98 * values <= one <= 1.02 * values for one in sent), (sent, values)
        assert max(sent) <= 0.11 * dense
