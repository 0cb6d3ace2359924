"""The curves and the table of several trainings."""

import json

import pytest
from compare_trainings import main


def figures(method="rigl", valid=2.0, **changes):
    return {
        "method": method, "data": "a.txt", "vocabulary": 65, "steps": 20, "loss": valid + 0.1,
        "accuracy": 0.5, "valid_loss": valid, "parameters": {"held": 1234},
        "history": [
            {"step": 10, "loss": 3.0, "valid_loss": 2.5},
            {"step": 20, "loss": 2.0, "valid_loss": valid},
        ],
    } | changes  # fmt: skip


def write(folder, *runs):
    files = []
    for number, run in enumerate(runs):
        files.append(str(folder / f"{number}.json"))
        (folder / f"{number}.json").write_text(json.dumps(run))
    return files


def test_table_has_mean_and_spread_sorted_by_loss(tmp_path, capsys):
    files = write(
        tmp_path, figures("set", 2.2), figures("rigl", 2.0), figures("rigl", 2.1, accuracy=0.6)
    )
    assert main(files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| rigl | 2 | 1,234 | 2.0500 (2.0000 to 2.1000) | 2.1500 (2.1000 to 2.2000) | 55.00 % |",
        "| set | 1 | 1,234 | 2.2000 (2.2000 to 2.2000) | 2.3000 (2.3000 to 2.3000) | 50.00 % |",
    ]


def test_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    files = write(tmp_path, figures(), figures("dense", 2.3))
    assert main([*files, "--output", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("draws", [True, False])
def test_other_files_print_one_line(draws, tmp_path, capsys):
    output = ["--output", str(tmp_path / "a.png")] if draws else []
    (tmp_path / "bad").write_text("[1")
    for wrong in (
        *write(tmp_path, [], {}, figures(history=[]), figures(loss=None), figures(history=[1])),
        tmp_path / "bad",
    ):
        assert main([str(wrong), *output]) == 2
        err = capsys.readouterr().err
        assert "expected the figures of a whole training by `dynsparse lm --json`" in err
        assert err.count("\n") == 1
    assert main([str(tmp_path / "none"), *output]) == 2
    assert "No such file" in capsys.readouterr().err


def test_trainings_of_different_length_raise(tmp_path, capsys):
    assert main(write(tmp_path, figures(), figures(steps=30))) == 2
    assert "expected trainings on one text with equally many steps" in capsys.readouterr().err
