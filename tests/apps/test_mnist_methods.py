"""Every `--method` trains to the given densities and resumes exactly."""

import pytest
import torch
from rich.console import Console

from dynsparse.apps.image_classification.mnist import Options, run
from dynsparse.training.checkpoint import read_extra
from dynsparse.training.records import Records

QUIET = Console(quiet=True)
TINY = {"batch_size": 16, "hidden_sizes": (128,), "steps_per_epoch": 4, "epochs": 2, "seed": 7}
METHODS = ["snfs", "mest", "deepr", "topkast", "gmp", "granet"]


def tiny(**changes):
    return run(Options(**{**TINY, **changes}), QUIET)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_method_trains_and_resumes(method, tmp_path):
    pytest.importorskip("sklearn")
    whole = tiny(method=method, records_path=tmp_path / "record")
    assert whole["accuracy"] > 0.8
    assert whole["updates"] >= 4
    assert whole["method"] == method
    blocks = [layer["weights"] for layer in whole["layers"]]
    if method == "snfs":
        assert sum(blocks) == round(0.1 * 784 * 128) + 384
    else:
        assert blocks == [round(0.1 * 784 * 128), 384]  # 0.3 of 128 * 10
    sizes = [p.nnz for _, p in Records.load(tmp_path / "record").patterns("fc1")]
    assert sizes[0] == {"gmp": 784 * 128, "granet": 784 * 64}.get(method, 10035)
    assert sizes[-1] == blocks[0]
    tiny(method=method, checkpoint_path=tmp_path / "half", stop_after=1)
    torch.manual_seed(99)
    halves = tiny(method=method, restore=tmp_path / "half", checkpoint_path=tmp_path / "half")
    for key in ("accuracy", "loss", "updates", "replaced", "steps", "layers"):
        assert halves[key] == whole[key]
    assert read_extra(tmp_path / "half" / "epoch-0002.ckpt")


@pytest.mark.parametrize("method", ["topkast", "gmp"])
def test_trained_network_gives_the_same_test_results(method, tmp_path):
    pytest.importorskip("sklearn")
    trained = tiny(method=method, checkpoint_path=tmp_path)
    tested = tiny(method=method, restore=tmp_path, test_mode="tests")
    assert tested["accuracy"] == trained["accuracy"]
    assert tested["loss"] == pytest.approx(trained["loss"])


def test_blocks(tmp_path):
    pytest.importorskip("sklearn")
    for method in ("granet", "snfs"):
        changes = {"block_size": 16, "hidden_sizes": (64,), "densities": (0.1, 1.0)}
        assert tiny(method=method, pooling_type="SUM", **changes)["accuracy"] > 0.6
