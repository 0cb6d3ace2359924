"""Every flag of Graphcore's programs is accepted, or raises a one-line error that names it."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("typer")

import dynsparse.apps.lm as lm_app
from dynsparse.apps.image_classification import cifar as cifar_app
from dynsparse.apps.image_classification import mnist as mnist_app
from dynsparse.apps.image_classification import transformer as transformer_app
from dynsparse.cli.app import run
from dynsparse.cli.original import PROGRAMS, translate
from popsparse.cli.matmul import methods

# Read off the programs, with a value that each takes.
_WANDB = "--use-wandb --wandb-project-name=p --wandb-tags=t --wandb-name=n "
_SPARSE_MODEL = (
    "--sparsity=0.9 --block-size=4 --prune-ratio=0.3 --regrow-type=rigl "
    '--sparse-matmul-options={"availableMemoryProportion":0.9} '
    '--dense-grad-matmul-options={"partialsType":"float"} --disable-updating --pooling-type=SUM '
    '--no-outline-sparse-layer --cosine-prune-schedule={"zero_steps":0} '
)
_TRANSFORMER = (
    "--dtype=float32 --random-seed=42 --batch-size=1 --num-shards=1 --encoder-layers=2 "
    "--decoder-layers=2 --attention-heads=1 --hidden-length=64 --qkv-length=128 --ff-length=256 "
    "--embedding-length=32 --source-sequence-length=128 --target-sequence-length=128 "
    "--source-vocab-length=300 --target-vocab-length=300 --target-bos-id=0 --target-pad-id=3 "
    "--target-eos-id=1 --source-pad-id=3 --exclude-embedding --include-projection-bias "
    "--dropout-keep-prob=0.9 --config-file=f --exclude-attention-biases --disable-concat-qkv "
    "--use-static-sparse-autoregressive-attention --outline-encoder --no-outline-dropout "
    "--encoder-stage-dense-matmul-options={} --projection-stage-dense-matmul-options={} "
)
FLAGS = {
    "sparse_mnist.py": (
        38,
        "--test-mode=all --densities=0.1 --droprate=0.1 --log=f --seed=1 --checkpoint-path=c "
        "--checkpoint-freq=1 --batch-size=16 --gradient-accumulation-count=4 --pipelining "
        "--steps-per-epoch=5 --epochs=10 --log-level=INFO --disable-pruning --regrow=random "
        "--prune-ratio=0.3 --records-path=r --optimizer=Momentum --restore=f --start-epoch=1 "
        "--data-type=fp32 --block-size=4 --partials-type=fp32 --pooling-type=SUM "
        "--disable-shared-buckets --permute-input=block --hidden-size=320 "
        "--train-device-iterations=2 --disable-dense-grad-override --single-train-step-only "
        '--pipeline-schedule=Grouped --cosine-prune-schedule={"zero_steps":0} --on-demand '
        f"{_WANDB}--optimizer-arg=momentum=0.9",
    ),
    "sparse_transformer_rigl_mnist.py": (
        46,
        "--mode=train --train-checkpoint-path=c --nepochs=1 --steps-per-epoch=5 --optimizer=Adam "
        f"--optimizer-arg=beta1=0.9 {_SPARSE_MODEL}{_TRANSFORMER}",
    ),
    "train_sparse.py": (
        88,
        "--extra-poplar-options-disable --extra-poplar-options-sync-enable "
        "--extra-poplar-options-num-callback-threads=4 --mode=train --nepochs=1 "
        "--train-checkpoint-path=c --autoregression-offset=8 --repeat-count=50 --recompute "
        "--sparse-embeddings --restore-epoch=1 --optimizer=Adam --grad-norm-clip=1 --loss-scale=1 "
        "--unscale-grad-pre-acc --grad-acculation-mode=Avg --scale-grad-pre-acc "
        "--slots-fp-type=float32 --force-fp32-weight-update --warmup-steps=10 --cooldown-steps=10 "
        "--peak-learning-rate=0.01 --min-learning-rate=0.001 --decay-power=0.5 --pipeline "
        "--gradient-accumulation-count=2 --gradient-accumulation-dtype=float32 "
        "--offload-activations --offload-gradient-accumulation-buffers "
        "--offload-weight-update-variables --use-synthetic-data --shuffle --disable-dataset-cache "
        "--disable-dataset-prefetch --data-dir=d --log-level=INFO --decode --log-histograms "
        f"--bins-count=100 {_WANDB}--debug-dense-grad --compile-only "
        "--compile-only-ipu-version=ipu2 --on-demand --optimizer-arg=beta1=0.9 "
        f"{_SPARSE_MODEL}{_TRANSFORMER}",
    ),
    "sparse_matmul.py": (
        9,
        "--batch-size=8 --input-size=64 --output-size=64 --pattern=random --density=0.1 "
        "--block-size=4 --data-type=fp16 --meta-info-oversize=0.1 --pooling-type=SUM",
    ),
    "sparse_fc_layer": (
        25,
        "--help --compile-only --device-type=IpuModel2 --input-size=64 --output-size=64 "
        "--sparsity-factor=0.1 --data-type=half --partials-type=float --tiles-per-ipu=24 "
        "--batch-size=8 --block-size=4 --single-phase=fwd --ignore-data --plan-only --profile=f "
        "--profile-dir=d --report-plan=true --report-total-cycle-counts --variable-seed "
        "--weighted-area-begin={0,0} --weighted-area-end={32,32} --weighted-area-weighting=2.0 "
        '--matmul-options={"partialsType":"float"} --plan-constraints={"partition":{"z":1}} '
        "--report-dense-gradw-serial-splits=true",
    ),
    "visualise_connectivity.py": (3, "--cmap=magma --records-path=there --animate"),
}
# What has to be given beside a flag for it to have an effect, or to be asked for at all.
BASE = {
    "mnist": ["--dataset", "digits"],
    "mnist-transformer": ["--dataset", "digits"],
    "lm": ["--data", "stdlib"],
    "matmul": ["--rows=64", "--cols=64", "--batch=8"],
    "visualise": ["--records-path=there"],
}
BESIDE = {
    "--densities": ["1"],
    **{f"--wandb-{name}": ["--use-wandb"] for name in ("project-name", "tags", "name")},
    "--checkpoint-freq": ["--checkpoint-path=c"],
    "--loss-scale": ["--dtype=float16"],
    "--pooling-type": ["--block-size=4"],
    "--permute-input": ["--block-size=4"],
    "--source-vocab-length": ["--tokens=bpe"],
    "--weighted-area-begin": ["--weighted-area-end", "32", "32"],
    "--weighted-area-end": ["--weighted-area-begin", "0", "0"],
    "--weighted-area-weighting": [
        *("--weighted-area-begin", "0", "0", "--weighted-area-end", "32", "32"),
    ],
}


class Started(Exception):
    pass


@pytest.fixture
def nothing_runs(monkeypatch, tmp_path):
    def started(options, *args, **named):
        if callable(getattr(options, "check", None)):
            options.check()  # what every training begins with
        raise Started

    for module in (mnist_app, transformer_app, cifar_app, lm_app):
        monkeypatch.setattr(module, "run", started)
    monkeypatch.setattr(methods, "METHODS", dict.fromkeys(methods.METHODS, started))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("program", FLAGS)
def test_table_has_every_flag(program):
    count, flags = FLAGS[program]
    names = [flag.partition("=")[0] for flag in flags.split()]
    table = PROGRAMS[program]
    assert len(set(names)) == len(names) == count
    assert sorted(names) == sorted([*table.same, *table.changed])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", FLAGS)
def test_every_flag_is_accepted_or_explained(program, nothing_runs, capsys):
    table = PROGRAMS[program]
    for flag in FLAGS[program][1].split():
        name, equals, value = flag.partition("=")
        base = [] if name == "--records-path" else BASE[table.command]
        given = [name, value] if equals else [flag]
        arguments = [table.command, *base, *given, *BESIDE.get(name, [])]
        try:
            status = run(arguments)
        except Started:
            continue
        captured = capsys.readouterr()
        if table.command == "visualise":
            assert "there" in captured.err  # the folder is not; the flags were taken
        elif name != "--help":
            answer = table.changed.get(name, "")
            answer = answer[value] if isinstance(answer, dict) else answer
            assert status == 2, (arguments, captured.out)
            assert captured.err.startswith(f"dynsparse: {name}"), captured.err
            assert captured.err.endswith(f": {answer}\n"), captured.err
            assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("lm", "--dropout-keep-prob 0.9 --layers 2", "--droprate=0.1 --layers 2"),
        ("lm", "--grad-acculation-mode Avg --steps 3", "--steps 3"),
        ("mnist", "--regrow=random --seed 1", "--method=set --seed 1"),
        ("mnist", "--data-type bfloat16", "--data-type bfloat16"),
        ("mnist", "--data-type fp16 --partials-type fp32", "--data-type=float16"),
        ("lm", "--dtype float16 --loss-scale 64", "--data-type=float16 --loss-scale 64"),
        ("lm", "--slots-fp-type=float32 --scale-grad-pre-acc --steps 3", "--steps 3"),
        ("mnist-transformer", "--nepochs 2 --mode test", "--epochs=2 --test-mode=tests"),
        ("matmul", "--report-plan --json", "--report-plan --json"),
        ("matmul", "--report-plan false --json", "--json"),
        ("matmul", "--weighted-area-begin {4,8}", "--weighted-area-begin 4 8"),
        ("matmul", "--weighted-area-begin 4 8", "--weighted-area-begin 4 8"),
        ("matmul", "--input-size 8 --output-size 4", "--cols=8 --rows=4"),
        ("matmul", "--data-type fp32", "--dtype=float32"),
        ("cifar", "--regrow random", "--regrow random"),
    ],
)
def test_translated_flags(command, given, expected):
    assert translate(command, given.split()) == expected.split()


def test_invalid_keep_probability():
    with pytest.raises(ValueError, match="--dropout-keep-prob: expected a number, got 'x'"):
        translate("lm", ["--dropout-keep-prob", "x"])
