"""Options that do not apply to a training raise a one-line error instead of being ignored."""

import dataclasses
import re
import sys

import pytest

pytest.importorskip("typer")

from rich.console import Console

from dynsparse.apps import lm
from dynsparse.apps.common.options import METHODS
from dynsparse.apps.image_classification import cifar, mnist, transformer
from dynsparse.cli.app import run as command
from dynsparse.options import check_applies, default_of, flag, options_of

APPS = {"mnist": mnist, "mnist-transformer": transformer, "cifar": cifar, "lm": lm}

UPDATING = {"rigl", "set", "snfs", "mest", "deepr", "topkast", "gmp", "granet"}
REPLACING = {"rigl", "set", "snfs", "mest", "topkast"}
# By hand: which methods have a use for an option. All have one for those that are not here.
OF_METHODS = {
    "block_size": UPDATING | {"static"},
    "pooling_type": {"rigl", "snfs", "granet"},
    "prune_ratio": REPLACING | {"granet"},
    "update_interval": UPDATING,
    "cosine_prune_schedule": REPLACING,
    "prune_rounding": REPLACING,
    "densities": UPDATING | {"static"},
    "sparsity": UPDATING | {"static"},
    "sparse_embeddings": UPDATING - {"topkast"} | {"static"},
    "interleave_heads": UPDATING | {"static"},
    "match_blocks": UPDATING - {"gmp", "granet"} | {"static"},
    "prune_end": UPDATING,
    "allocation": UPDATING | {"static"},
    "match_parameters": {"dense"},
    "target": {"rigl", "set", "gmp", "granet", "static", "dense"},
    "tiles": {"rigl", "set", "gmp", "granet", "static", "dense"},
}
# What must come with an option; and what makes it useless, with any method.
WITH = {
    "overwrite": ["--checkpoint-path=there"],
    "checkpoint_freq": ["--checkpoint-path=there"],
    "wandb_project_name": ["--use-wandb"],
    "wandb_name": ["--use-wandb"],
    "wandb_tags": ["--use-wandb"],
    "prompt": ["--sample=3"],
    "temperature": ["--sample=3"],
    "top_k": ["--sample=3"],
    "vocabulary_size": ["--tokens=bpe"],
    "bpe_dir": ["--tokens=bpe"],
    "tiles": ["--target=bow"],
    "loss_scale": ["--data-type=float16"],
}
WITHOUT = {
    "overwrite": [],
    "checkpoint_freq": [],
    "loss_scale": [],
    "prompt": [],
    "temperature": [],
    "top_k": ["--sample=3", "--temperature=0"],
    "valid_share": ["--valid-data=text"],
    "test_share": ["--test-data=text"],
}
SAMPLES = {
    "densities": "0.2",
    "augment": "none",
    "device": "cpu",
    "target": "bow",
    "cosine_prune_schedule": '{"zero_steps": 1}',
}


def required_options(app, name):
    """Return the options that must accompany an option, so that it applies with any method."""
    if name == "data_dir":
        return ["--dataset=cifar-10" if app == "cifar" else "--dataset=mnist"]
    return WITH.get(name, [])


def flag_with_value(app, name):
    """Return the flag with a valid value; an explicit default counts as given too."""
    kind = APPS[app].Options
    known = options_of(kind)[name]
    default = default_of(kind.__dataclass_fields__[name])
    if name == "stop_after":
        default = 250 if app == "lm" else 5
    if known.kind.type is bool:
        return [f"--{flag(name)}"]
    if name in SAMPLES:
        values = [SAMPLES[name]] * (2 if name == "densities" else 1)
        return [f"--{flag(name)}={value}" for value in values]
    if known.kind.type is dict:
        return [f"--{flag(name)}={known.kind.example}"]
    if known.kind.is_list:
        return [f"--{flag(name)}={value}" for value in default or ("a",)]
    if default is None:
        default = {int: "300", float: "0.1", str: "byte"}.get(known.kind.type, "a")
    return [f"--{flag(name)}={default}"]


@pytest.fixture
def nothing_starts(monkeypatch):
    """Stop commands once their options are valid."""
    for module in ("dynsparse.apps.image_classification.run", "dynsparse.apps.lm.run"):
        monkeypatch.setattr(sys.modules[module], "_run", lambda *a, **k: {})


def run_command(capsys, arguments):
    """Run a command; return (exit status, stderr on one line)."""
    status = command(arguments)
    told = capsys.readouterr().err
    assert told.count("\n") == (status != 0), told
    return status, told


@pytest.mark.slow
@pytest.mark.parametrize("app", APPS)
def test_every_option_with_every_method(app, nothing_starts, tmp_path, monkeypatch):
    """First as parsed from the command line, then with each other method."""
    monkeypatch.chdir(tmp_path)
    run, seen = APPS[app].run, []
    monkeypatch.setattr(APPS[app], "run", lambda options, given: seen.append((options, given)))
    for name in options_of(APPS[app].Options):
        if name in ("method", "restore"):
            continue
        assert command([app, *required_options(app, name), *flag_with_value(app, name)]) == 0
        options, asked = seen.pop()
        assert name in asked
        for method in METHODS:
            now = dataclasses.replace(options, method=method)
            if method in OF_METHODS.get(name, METHODS):
                run(now, given=asked | {"method"})
                continue
            with pytest.raises(ValueError, match=f"--{flag(name)}.*{method}") as told:
                run(now, given=asked | {"method"})
            assert re.fullmatch(
                "[^\n]*(leave it out|leave one out|--method)[^\n]*", str(told.value)
            )


@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize(("method", "name"), [("static", "prune_ratio"), ("dense", "block_size")])
def test_exit_status_2(app, method, name, capsys, nothing_starts):
    status, told = run_command(capsys, [app, f"--method={method}", *flag_with_value(app, name)])
    assert status == 2
    assert re.match(f"dynsparse: --{flag(name)}: applies to --method rigl, .*, got --method "
                    f"{method}: leave it out\n", told)  # fmt: skip


@pytest.mark.parametrize("app", APPS)
def test_option_without_the_option_it_needs(app, capsys, nothing_starts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, others in WITHOUT.items():
        if name in options_of(APPS[app].Options):
            status, told = run_command(capsys, [app, *others, *flag_with_value(app, name)])
            assert (status, f"--{flag(name)}: " in told) == (2, True), (name, told)


DENSE = {"mnist": ["--densities=1", "--densities=1"], "mnist-transformer": ["--sparsity=0"],
         "cifar": ["--sparsity=0"], "lm": ["--sparsity=0"]}  # fmt: skip


@pytest.mark.parametrize("app", APPS)
def test_update_options_without_sparse_layers(app, capsys, nothing_starts):
    for name in ("block_size", "pooling_type", "prune_ratio", "update_interval"):
        status, told = run_command(capsys, [app, *DENSE[app], *flag_with_value(app, name)])
        assert (status, "sparse" in told) == (2, True), told
    assert command([app, *DENSE[app]]) == 0


def test_block_size_with_a_dense_first_layer(capsys, nothing_starts):
    arguments = ["mnist", "--densities=1", "--densities=0.3", "--block-size=16"]
    status, told = run_command(capsys, arguments)
    assert (status, "a sparse first layer, got density 1" in told) == (2, True)


@pytest.mark.parametrize("mode", ["test", "sample"])
def test_training_options_without_training(mode):
    options = lm.Options(mode=mode, sample=5, restore="there")
    for name, known in options_of(lm.Options).items():
        of_training = name in (
            "steps", "peak_learning_rate", "min_learning_rate", "decay_power", "warmup_steps",
            "cooldown_steps", "optimizer", "optimizer_arg", "gradient_accumulation_count",
            "grad_norm_clip", "repetition_weighting", "valid_interval", "checkpoint_path",
            "checkpoint_freq", "stop_after", "records_path", "tensorboard", "use_wandb",
            "wandb_name", "wandb_project_name", "wandb_tags", "initial_scale", "prune_ratio",
            "pooling_type", "update_interval", "prune_end", "cosine_prune_schedule",
            "prune_rounding", "overwrite", "loss_scale", "target", "tiles",
        )  # fmt: skip
        of_text = mode == "sample" and name in (
            "data", "valid_data", "test_data", "valid_share", "test_share", "batch_size",
            "autoregression_offset", "evaluation_tokens",
        )  # fmt: skip
        wrong_method = known.methods and options.method not in known.methods
        of_bpe = name == "vocabulary_size"
        if of_training or of_text or of_bpe or wrong_method:
            with pytest.raises(ValueError, match=f"^--{flag(name)}"):
                check_applies(options, {name})
        else:
            check_applies(options, {name})


def test_testing_accepts_the_options_of_the_training():
    """The command line of the training may be repeated for testing; nothing is written."""
    options = mnist.Options(test_mode="tests", restore="there")
    check_applies(options, {"learning_rate", "epochs", "prune_ratio", "optimizer"})
    for name in ("checkpoint_path", "records_path", "log", "tensorboard"):
        with pytest.raises(ValueError, match=f"^--{flag(name)}: applies to runs that train, got "):
            check_applies(options, {name})


def test_defaults_presets_and_checkpoints_raise_nothing(capsys, nothing_starts):
    for preset in lm.PRESETS:
        for method in METHODS:
            assert command(["lm", "--preset", preset, "--method", method]) == 0
    options = mnist.Options(method="static", prune_ratio=0.5)  # as a checkpoint may say
    check_applies(options, {"method"})


# Read by what decides whether options are right, which is not a use of them.
_CHECKS = {
    "check", "check_together", "check_network", "check_applies", "definition", "replace",
    "fill_in", "_check_network", "_check_schedules", "_check_companions", "<lambda>",
    "__init__", "binding", "__repr__", "__post_init__",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "method"), [*(("mnist", m) for m in METHODS), ("mnist-transformer", "rigl")]
)
def test_accepted_options_are_read(app, method, tmp_path):
    """A short training reads every option that applies to its method."""
    pytest.importorskip("sklearn")
    read = set()

    class Watched(APPS[app].Options):
        def __getattribute__(self, name):
            caller = sys._getframe(1).f_code
            if caller.co_name not in _CHECKS or "training.py" in caller.co_filename:
                read.add(name)
            return super().__getattribute__(name)

    small = {"hidden_sizes": (16,)} if app == "mnist" else {"encoder_layers": 1}
    options = Watched(
        method=method,
        epochs=2,
        steps_per_epoch=2,
        batch_size=256,
        checkpoint_path=tmp_path,
        **small,
    )
    APPS[app].run(options, Console(quiet=True))
    options = options_of(APPS[app].Options)
    accepted = {name for name, known in options.items() if method in known.methods}
    assert accepted - read <= {"wandb_project_name", "wandb_name", "wandb_tags"}
