"""Data parallel training in processes of their own: the same as one process with all samples."""

from __future__ import annotations

import data_parallel as work
import pytest
import torch
from processes import on_ranks
from rank_trainings import ALGORITHMS, apart

from dynsparse._core import native


def equal(found):
    """Whether the patterns were the same after each step, and the weights to rounding."""
    return all(same and difference <= 1e-10 for same, difference in found)


def check(size, names, steps):
    results = on_ranks(size, work.compared, list(names), steps)
    for name in names:
        found = [result[name] for result in results]
        assert {same for same, _, _ in found} == {steps}, name
        assert max(difference for _, difference, _ in found) <= 1e-10, name
        for _, _, bits in found[1:]:
            assert all(torch.equal(bits[layer], found[0][2][layer]) for layer in bits), name


@pytest.mark.quick
def test_two_ranks_train_as_one_process_does():
    check(2, ALGORITHMS, 6)


@pytest.mark.slow
def test_four_ranks_train_as_one_process_does():
    check(4, ALGORITHMS, 12)


def test_convolutions_train_as_in_one_process():
    for found in on_ranks(2, work.convolved, 6):
        assert len(found) == 6
        assert equal(found)


def test_wrappers_of_every_kind():
    for found in on_ranks(2, work.kinds):
        for name, steps in found.items():
            assert equal(steps), name


def test_communication_hooks_stay_when_sizes_change():
    for calls, sizes in on_ranks(2, work.hooks_stay):
        assert set(calls) == {1}
        assert sizes[0] < 77


def test_ranks_that_begin_apart_are_put_right():
    one, other = on_ranks(2, work.layers_begin_apart)
    for a, b in zip(one, other, strict=True):
        assert apart(a, b) == (True, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_compiled(inside):
    for found in on_ranks(2, work.compiled, inside):
        assert equal(found)


def test_faults_of_one_rank_are_one_line_on_all():
    lines, other = on_ranks(2, work.faults)
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


def test_a_layer_that_one_rank_left_out_is_the_same_on_all():
    (updates, one), (again, other) = on_ranks(2, work.one_leaves_a_layer_out)
    assert updates == again == 2
    assert apart(one, other) == (True, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rigl", "topkast"])
def test_ranks_of_different_instruction_sets_agree(name):
    isas = [isa for isa in native.supported_isas() if native.describe()["backend"] == "native"]
    if len(isas) < 2:
        pytest.skip("this machine runs one instruction set")
    first, second = on_ranks(2, work.instructions, name, 30, [isas[-1], isas[0]])
    assert (first[0], second[0]) == (isas[-1], isas[0])
    assert first[1] == second[1] == 30
    assert all(torch.equal(first[2][layer], second[2][layer]) for layer in first[2])


def test_a_rank_that_leaves_out_a_step_is_named_and_nobody_waits():
    """That rank itself is in the next backward pass, and learns of it when the others end."""
    line = "not all ranks came in time: step 3 of this rank ends in an update; call trainer"
    with pytest.raises(AssertionError, match=f"{line}.*Ranks 1 failed.* 2000 ms"):
        on_ranks(2, work.missing)


def test_traffic():
    """Of one float32 all-reduce of the dense gradient, for which a rank sends 2 (R - 1) / R times
    its size. What is counted is what the trainer sends; in other steps nothing goes over the wire
    but the gradients of the values."""
    dense = 4 * 1024**2
    for found in on_ranks(2, work.traffic):
        for name, most in (("gradients", 0.56), ("samples", 0.2)):
            *others, update = found[name]
            assert others == [0, 0, 0]
            assert 0 < update <= most * dense, (name, update / dense)


def test_compressed_gradients_of_values_that_change_their_number():
    for seen, finite in on_ranks(2, work.with_power_sgd):
        assert len(set(seen)) > 3
        assert finite


def test_traffic_of_a_step():
    """What DistributedDataParallel sums up is the gradients of the values, and nothing else."""
    for sent, values, dense, buffers in on_ranks(2, work.step_traffic):
        assert buffers == 0
        assert all(0.98 * values <= one <= 1.02 * values for one in sent), (sent, values)
        assert max(sent) <= 0.11 * dense
