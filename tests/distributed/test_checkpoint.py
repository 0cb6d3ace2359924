"""Checkpoints of several ranks load on any other number of ranks, sharded or replicated."""

import os

import checkpoint_runs as runs
import pytest
import torch
from checkpoint_files import edit_header
from processes import on_ranks

import dynsparse as ds


def run_in_one_process(kind, *rest):
    """Call `runs.resume_and_save` in this process, without a process group."""
    return runs.resume_and_save(0, 1, kind, *rest)


def check_legs(legs, tmp_path, *algorithm):
    source, first = None, 0
    for number, (kind, size) in enumerate(legs):
        target = str(tmp_path / str(number))
        rest = (kind, source, target, first, first + 3, *algorithm)
        found = (
            [run_in_one_process(*rest)]
            if size == 1
            else on_ranks(size, runs.resume_and_save, *rest)
        )
        for off, steps in found:
            assert off < 1e-12, (number, kind, off)
            assert steps == first + 3
        source, first = target, first + 3


def test_resume_across_wrappers_and_numbers_of_ranks(tmp_path):
    check_legs([("fsdp", 2), ("alone", 1), ("ddp", 2), ("fsdp", 2)], tmp_path)


@pytest.mark.parametrize("algorithm", ["rigl", "set"])
def test_pattern_updates_continue_after_resume(algorithm, tmp_path):
    check_legs([("fsdp", 2), ("grid", 2), ("alone", 1), ("ddp", 2)], tmp_path, algorithm)


@pytest.mark.parametrize("algorithm", ["snfs", "snfs-dense"])
def test_momentum_resumes_between_ddp_and_one_process(algorithm, tmp_path):
    check_legs([("ddp", 2), ("alone", 1), ("ddp", 2)], tmp_path, algorithm)


@pytest.mark.slow
def test_momentum_resumes_across_layouts_and_numbers_of_ranks(tmp_path):
    legs = [("fsdp", 2), ("ddp", 4), ("alone", 1), ("grid", 2), ("fsdp", 2)]
    check_legs(legs, tmp_path, "snfs-dense-fixed")


def test_state_dict_has_momentum_of_own_rank_and_checkpoint_of_all(tmp_path):
    (first, one), (second, other) = on_ranks(2, runs.compare_momenta, str(tmp_path / "c"))
    assert max(first + second) < 1e-12
    assert all((one[name] - other[name]).abs().max() > 1e-3 for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["static", "rigl"])
def test_resume_fully_sharded_tensor_parallel_layers(algorithm, tmp_path):
    legs = [("shards of a grid", 4), ("grid", 2), ("shards of a grid", 4), ("alone", 1)]
    check_legs(legs, tmp_path, algorithm)


@pytest.mark.slow
def test_resume_on_two_four_and_one_ranks(tmp_path):
    legs = [("ddp", 2), ("fsdp", 4), ("alone", 1), ("grid", 2), ("grid", 4), ("fsdp", 2)]
    legs += [("grid", 4), ("ddp", 4)]
    check_legs(legs, tmp_path, "rigl")


def test_each_rank_restores_its_own_generators(tmp_path):
    first, second = on_ranks(2, runs.restore_generators, str(tmp_path / "c"))
    assert first != second


def test_all_ranks_raise_the_same_errors(tmp_path):
    first, second = on_ranks(2, runs.collect_errors, str(tmp_path))
    assert first == second
    assert all("\n" not in line for line in first)


@pytest.mark.parametrize("kind", runs.KINDS)
def test_save_without_waiting_during_training(kind, tmp_path):
    assert max(on_ranks(2, runs.save_in_background, kind, str(tmp_path / "c"))) < 1e-12


@pytest.mark.slow
def test_resume_hybrid_sharded_model(tmp_path):
    assert all(on_ranks(4, runs.resume_hybrid_sharded, str(tmp_path / "c")))


def training(seed=0):
    torch.manual_seed(seed)
    model = runs.models.linear_model(seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = ds.SNFS(model, optimizer, total_steps=100, update_interval=4, window=3)
    return model, optimizer, trainer


def saved(tmp_path, **options):
    model, optimizer, trainer = training()
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
    ds.training.save_checkpoint(tmp_path / "c", **parts, **options)
    return parts


def test_interrupted_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    from dynsparse.training.checkpoint import format as module

    parts = saved(tmp_path, extra={"number": 1})
    path = tmp_path / "c"
    for place, fails in ((module, "to_bytes"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(place, fails, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                ds.training.save_checkpoint(path, **parts, extra={"number": 2})
        assert ds.training.load_checkpoint(path, model=parts["model"]) == {"number": 1}
    (tmp_path / "c.0123abcd-1").touch()  # of more ranks that saved before
    (tmp_path / ".c.0123abcd-2.0123abcd.tmp").touch()  # of a rank that was killed
    (tmp_path / "c.other").touch()
    ds.training.save_checkpoint(path, **parts, extra={"number": 3})
    assert ds.training.load_checkpoint(path, **parts) == {"number": 3}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "c.other"]


def test_extra_round_trips_plain_types(tmp_path):
    extra = {
        "numbers": [1, 2.5, -0.0, float("inf"), 2**70, True, None],
        3: ("a", [torch.arange(6).view(2, 3)], {"$": "sign"}),
        "dtype": torch.bfloat16,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(True),
    }
    parts = saved(tmp_path, extra=extra)
    found = ds.training.load_checkpoint(tmp_path / "c", **parts)
    assert torch.equal(found[3][1].pop(), extra[3][1].pop())
    assert torch.equal(found.pop("empty"), extra.pop("empty"))
    assert torch.equal(found.pop("scalar"), extra.pop("scalar"))
    assert found == extra


def test_dense_momentum_of_layers_that_only_some_ranks_reached_is_redistributed():
    from dynsparse.training.history import DenseMomentum

    a, b, c = torch.randn(3, 4, 4)
    states = [{"momentum": {"0": a, "1": b}}, {"momentum": {"0": a, "2": c}}]
    merged = DenseMomentum().share_of(states, 0, 1)["momentum"]
    expected = {"0": a, "1": b / 2, "2": c / 2}
    assert merged.keys() == expected.keys()
    for name, matrix in merged.items():
        torch.testing.assert_close(matrix, expected[name])


def test_gradient_history_is_redistributed_over_ranks():
    _, _, trainer = training()
    history = trainer.history
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(2, 24, generator=g), torch.randn(2, 32, generator=g)) for _ in range(6)]
    states = [{"steps": {"0": [[pairs[r]], [pairs[r + 3]]]}} for r in range(3)]

    def mean(parts, step):
        return sum(dy.t() @ x for s in parts for x, dy in s["steps"]["0"][step]) / len(parts)

    for size in (1, 2, 3, 5):
        parts = [history.share_of(states, rank, size) for rank in range(size)]
        for step in range(2):
            torch.testing.assert_close(mean(parts, step), mean(states, step))
    dense = [{"momentum": {"0": torch.randn(4, 4, generator=g)}} for _ in range(2)]
    for size in (1, 2, 3):
        from dynsparse.training.history import DenseMomentum

        parts = [DenseMomentum().share_of(dense, rank, size) for rank in range(size)]
        found = sum(part["momentum"]["0"] for part in parts) / size
        torch.testing.assert_close(found, sum(s["momentum"]["0"] for s in dense) / 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(format="pickle"), "expected the format"),
        (lambda h: h.update(version=9), "version 9, this dynsparse reads version 1"),
        (lambda h: h.update(token="../../xx"), "expected a token"),
        (lambda h: h.pop("state"), "is damaged: KeyError"),
        (lambda h: h.update(ranks=0), "expected a number of ranks"),
        (lambda h: h.update(ranks=2), "is missing: expected the files of 2 ranks"),
        (lambda h: h.update(groups=[[3]]), "ranks that it has no files of"),
        (lambda h: h["entries"]["model/0.values"].update(shape=[2**40]), "expected a chunk of"),
        (lambda h: h["entries"]["model/0.values"].update(dtype="F16"), "expected a chunk of"),
        (lambda h: h["state"].update(extra={"$": ["os.system", "x"]}), "plain types"),
        (lambda h: h["state"].update(optimizer=3), "expected a dict as its optimizer"),
        (lambda h: h["state"]["model"].popitem(), "only one of file and model"),
    ],
)
def test_damaged_headers_raise_and_change_nothing(change, message, tmp_path):
    parts = saved(tmp_path)
    edit_header(tmp_path / "c", change)
    before = {name: t.clone() for name, t in parts["model"].state_dict().items()}
    with pytest.raises(ds.training.CheckpointError, match=message) as found:
        ds.training.load_checkpoint(tmp_path / "c", **parts)
    assert "\n" not in str(found.value)
    assert all(torch.equal(t, before[n]) for n, t in parts["model"].state_dict().items())
