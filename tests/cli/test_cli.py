"""The `dynsparse` command: output, and one line with exit status 2 for user errors."""

import json
import os
import re
import subprocess
import sys
import warnings

import pytest

import dynsparse
from dynsparse._core import native
from dynsparse.apps import lm
from dynsparse.apps.image_classification import cifar, mnist, transformer
from dynsparse.cli import info
from dynsparse.cli.app import run
from dynsparse.ops.linear.cuda.chip import INTERPRETED
from dynsparse.options import flag, options_of

APPS = {"mnist": mnist, "mnist-transformer": transformer, "cifar": cifar, "lm": lm}
TINY = ["mnist", "--epochs", "1", "--batch-size", "128", "--hidden-size", "32", "--seed", "3"]


@pytest.fixture(autouse=True)
def _warnings_stay(monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


def call(capsys, *arguments):
    status = run(list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err


def test_help_lists_the_commands(capsys):
    status, out, _ = call(capsys, "--help")
    assert status == 0
    for name in ("mnist", "visualise", "info"):
        assert name in out
    assert call(capsys)[:2] == (0, out)


@pytest.mark.parametrize("command", APPS)
def test_help_names_every_option(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # 80 cut long names
    _, out, _ = call(capsys, command, "--help")
    for name in options_of(APPS[command].Options):
        assert f"--{flag(name)}" in re.sub(r"\x1b\[[0-9;]*m", "", out)


def test_version(capsys):
    assert call(capsys, "--version")[:2] == (0, f"dynsparse {dynsparse.__version__}\n")


def test_mnist_writes_its_figures(capsys, tmp_path):
    status, out, err = call(
        capsys, *TINY, "--densities", "0.2", "1", "--json", str(tmp_path / "a.json"),
        "--optimizer", "Momentum", "--optimizer-arg", "momentum=0.5", "nesterov=false",
        "--cosine-prune-schedule", '{"period": 0.4}',
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "test accuracy" in out
    figures = json.loads((tmp_path / "a.json").read_text())
    assert [layer["density"] for layer in figures["layers"]] == [pytest.approx(0.2, abs=1e-3), 1]
    assert figures["dataset"] == "digits"


def test_three_layers_by_one_flag(capsys, tmp_path):
    arguments = "mnist --epochs 1 --hidden-sizes 30 20 --densities 0.1 0.2 1 --batch-size 128"
    status, _, _ = call(capsys, *arguments.split(), "--json", str(tmp_path / "a.json"))
    assert status == 0
    layers = json.loads((tmp_path / "a.json").read_text())["layers"]
    assert [layer["shape"] for layer in layers] == [[30, 784], [20, 30], [10, 20]]


def test_flags_must_match_the_checkpoint(capsys, tmp_path):
    folder = str(tmp_path)
    tiny = [*TINY, "--droprate", "0.2", "--checkpoint-path", folder]
    assert call(capsys, *tiny)[0] == 0
    restored = ["mnist", "--restore", folder, "--test-mode", "tests"]
    assert call(capsys, *restored)[0] == 0
    assert call(capsys, *restored, "--hidden-size", "32", "--droprate", "0.2")[0] == 0
    for wrong in (("--droprate", "0.1"), ("--hidden-size", "320"), ("--epochs", "10")):
        status, _, err = call(capsys, *restored, *wrong)
        assert status == 2
        assert "was trained with" in err


def test_visualise_draws_a_record(capsys, tmp_path):
    status, _, _ = call(capsys, *TINY, "--records-path", str(tmp_path / "rec"))
    assert status == 0
    output = tmp_path / "plots"
    status, out, _ = call(
        capsys, "visualise", "--records-path", str(tmp_path / "rec"), "--output", str(output)
    )
    assert status == 0
    assert out.split() == [str(output / "connectivity.png"), str(output / "curves.png")]
    assert all((output / name).stat().st_size > 1000 for name in os.listdir(output))


def test_info(capsys):
    status, out, _ = call(capsys, "info")
    assert status == 0
    for name in ("dynsparse", "kernels", "instruction set", "available", "threads", "torch"):
        assert name in out


def test_info_as_json(capsys):
    status, out, err = call(capsys, "info", "--json")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert facts["version"] == dynsparse.__version__
    kernels = native.describe()
    assert facts["kernels"]["isa"] == kernels["isa"]
    assert facts["kernels"]["available"] == kernels["available"]
    assert facts["threads"] == kernels["threads"]
    assert (len(facts["choices"]) == 1) == (kernels["backend"] == "native")
    for choices in facts["choices"]:
        assert len(choices["layers"]) == 4 * 2 * 4
        for layer in choices["layers"]:
            first, *others = layer["kinds"]
            assert first["from_density"] == 0
            assert all(0 < other["from_density"] <= 1 for other in others)


def test_info_with_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(info.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(info.torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(info, "chip_of", lambda device: INTERPRETED)
    for kernels in (True, False):
        monkeypatch.setattr(info, "runs_triton", lambda device, kernels=kernels: kernels)
        monkeypatch.setenv("COLUMNS", "160")
        status, out, _ = call(capsys, "info")
        assert status == 0
        out = out[out.index("4096 x 4096 on the GPU") :]
        assert "measured on chips" in " ".join(out.split())
        assert "like H100" in out
        assert ("blocks, dense 0.72" in out) == kernels


WRONG = [
    ("nonsense", "nonsense"),
    ("mnist --nonsense", "No such option"),
    ("mnist stray", "stray"),
    ("mnist --epochs", "--epochs"),
    ("mnist --epochs many", "expected an integer, got 'many'"),
    ("mnist --densities 0.1 -0.3", "expected numbers above 0 and up to 1"),
    ("mnist --optimizer-arg momentum", "expected name=json such as momentum=0.9, got 'momentum'"),
    ("mnist --cosine-prune-schedule x", "expected a JSON object"),
    ("mnist --restore letter.txt", "letter.txt is truncated or not a checkpoint"),
    ("mnist --dataset mnist --data-dir .", "expected train-images-idx3-ubyte"),
    ("mnist --json .", "--json: expected a file"),
    ("mnist --checkpoint-path letter.txt", "letter.txt"),
    ("visualise", "--records-path"),
    ("info --loud", "No such option"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_wrong_calls_print_one_line_and_exit_with_2(capsys, tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.txt").write_text("dear reader")
    status, out, err = call(capsys, *line.split())
    assert status == 2
    assert out == ""
    assert err.startswith("dynsparse: ")
    assert err.count("\n") == 1
    assert message in err


def test_internal_errors_keep_their_traceback(monkeypatch):
    def broken(options, given):
        raise KeyError("a bug")

    monkeypatch.setattr("dynsparse.apps.image_classification.mnist.run", broken)
    with pytest.raises(KeyError, match="a bug"):
        run(TINY)


def test_the_traceback_on_request(monkeypatch):
    monkeypatch.setenv("DYNSPARSE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="--epochs"):
        run(["mnist", "--epochs", "0"])


def test_out_of_memory_prints_one_line(capsys, monkeypatch):
    def hungry(options, given):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    monkeypatch.setattr("dynsparse.apps.image_classification.mnist.run", hungry)
    status, _, err = call(capsys, *TINY)
    assert (status, err) == (
        2,
        "dynsparse: not enough memory: lower the sizes, the densities or the batch size\n",
    )


def test_interrupt_prints_one_line(capsys, monkeypatch):
    def interrupted(options, given):
        raise KeyboardInterrupt

    monkeypatch.setattr("dynsparse.apps.image_classification.mnist.run", interrupted)
    status, _, err = call(capsys, *TINY)
    assert (status, err) == (130, "dynsparse: interrupted\n")


def test_warnings_are_printed_without_location(capsys, monkeypatch):
    monkeypatch.setattr(
        "dynsparse.apps.image_classification.mnist.run",
        lambda options, given: warnings.warn("slow", stacklevel=1),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        status, _, err = call(capsys, *TINY)
    assert (status, err) == (0, "dynsparse: warning: slow\n")


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_exit_status_of_the_process():
    done = python("-m", "dynsparse.cli", "mnist", "--epochs", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_missing_packages_print_one_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['typer'] = None\n")
    done = python("-m", "dynsparse.cli", "info", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        "dynsparse: the command line needs the package typer: pip install typer\n"
    )


def test_figures_are_written_atomically(tmp_path, monkeypatch):
    """A kill during the write keeps the previous figures."""
    (tmp_path / "f.json").write_text("before")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    arguments = ["mnist", "--epochs", "1", "--densities", "0.1", "--threads", "1", "--json"]
    assert run([*arguments, str(tmp_path / "f.json")]) == 2
    assert (tmp_path / "f.json").read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["f.json"]
