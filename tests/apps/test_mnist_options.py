"""Wrong options of the MNIST training raise a one-line error that names the flag."""

import pytest
import torch

from dynsparse.apps.image_classification.mnist import Options
from dynsparse.apps.image_classification.training import build_optimizer, learning_rate

NAN = float("nan")

WRONG = [
    (
        {"method": "snip"},
        "--method: expected one of rigl, set, snfs, mest, deepr, topkast, gmp, granet, static",
    ),
    ({"block_size": 2}, "--block-size: expected one of 1, 4, 8, 16, 32, 64, 128, got 2"),
    ({"batch_size": 0}, "--batch-size: expected an integer of at least 1, got 0"),
    ({"batch_size": 1.5}, "--batch-size: expected an integer of at least 1, got 1.5"),
    ({"epochs": True}, "--epochs: expected an integer of at least 1, got True"),
    ({"threads": 10**8}, "--threads: expected at most 1024"),
    ({"seed": 2**63}, "--seed: expected an integer below 2^63"),
    ({"stop_after": 11}, "--stop-after: expected one of the 10 epochs, got 11"),
    ({"droprate": 1.0}, "--droprate: expected a number in [0, 1), got 1.0"),
    ({"learning_rate": -0.1}, "--learning-rate: expected a finite number of at least 0"),
    ({"hidden_sizes": (10**9,)}, "--hidden-sizes: expected integers between 1"),
    ({"hidden_sizes": ()}, "--densities: expected one density per layer"),
    ({"densities": (0.1,)}, "expected one density per layer, 2 for 1 hidden layer(s), got 1"),
    ({"hidden_sizes": (30, 20)}, "expected one density per layer, 3 for 2 hidden layer(s), got 2"),
    ({"densities": (0.1, 1.1)}, "--densities: expected numbers above 0 and up to 1"),
    (
        {"block_size": 16, "hidden_sizes": (300,)},
        "--block-size 16 does not divide the first hidden size 300: choose a hidden size such as "
        "304",
    ),
    ({"cosine_prune_schedule": {"zero": 1}}, "--cosine-prune-schedule: expected the keys"),
    ({"cosine_prune_schedule": {"period": "1"}}, "period: expected a number, got '1'"),
    ({"cosine_prune_schedule": {"phase_delay": NAN}}, "phase_delay: expected a number"),
    ({"cosine_prune_schedule": {"zero_steps": 1.5}}, "zero_steps: expected a number of pattern"),
    ({"test_mode": "tests"}, "--test-mode tests: expected a trained network"),
    ({"data_dir": "somewhere"}, "--data-dir: the digits come with scikit-learn"),
    ({"wandb_name": "run"}, "add --use-wandb"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_options_raise(changes, message):
    with pytest.raises(ValueError, match="-") as error:
        Options(**changes).check()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


WRONG_ARGUMENTS = [
    ("Adam", {"momentum": 0.9}, "expected an argument of Adam (beta1, beta2, epsilon, weight_dec"),
    ("Momentum", {"beta1": 0.9}, "expected an argument of Momentum (momentum, nesterov"),
    ("Momentum", {"nesterov": 1}, "nesterov: expected true or false, got 1"),
    ("Momentum", {"momentum": "high"}, "momentum: expected a number, got 'high'"),
    ("Momentum", {"momentum": True}, "momentum: expected a number, got True"),
    ("Momentum", {"momentum": -1}, "momentum"),
    ("Adam", {"beta2": 1.5}, "beta"),
    ("GradientDescent", {"weight_decay": -1.0}, "weight_decay"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), WRONG_ARGUMENTS)
def test_wrong_optimizer_arguments_raise(name, arguments, message):
    options = Options(optimizer=name, optimizer_arg=arguments)
    options.check()
    with pytest.raises(ValueError, match="--optimizer-arg: ") as error:
        build_optimizer(options, torch.nn.Linear(2, 2))
    assert message in str(error.value)


def test_defaults_are_valid():
    Options().check()
    Options(hidden_sizes=(300, 100), densities=(0.01, 0.11, 1)).check()


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("constant", [0.02] * 5),
        ("steps", [0.02, 0.01, 0.005, 0.001, 0.0001]),
        ("cosine", [0.02, 0.0180902, 0.0130902, 0.0069098, 0.0019098]),
    ],
)
def test_learning_rate_schedules(decay, rates):
    options = Options(optimizer="Momentum", decay=decay)
    got = [learning_rate(options, step, 100) for step in (0, 20, 40, 60, 80)]
    assert got == pytest.approx(rates, abs=1e-7)
    assert learning_rate(options, 99, 100) <= rates[-1]


def test_learning_rate_scales_with_the_batch():
    assert learning_rate(Options(optimizer="Momentum", batch_size=64), 0, 9) == pytest.approx(0.08)
    assert learning_rate(Options(batch_size=64), 0, 9) == pytest.approx(0.004)
    assert learning_rate(Options(batch_size=64, learning_rate=0.5), 0, 9) == 0.5
