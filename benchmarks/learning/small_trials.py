"""The trials of the small experiments: a table per experiment, a line per trial."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Trial:
    """A training by Adam with a cosine schedule to 0 and batches of 100."""

    network: str = "mlp"
    """"mlp": 784-300-100-10; "conv": four convolutions of 16 to 64 channels."""
    method: str = "rigl"
    """"rigl", "set", "static", "dense", or "gmp"."""
    density: float = 0.02
    final_density: float = 1.0
    """For gmp."""
    allocation: str = "erk"
    left_dense: tuple[int, ...] = (-1,)
    """Indices of the layers that stay dense."""
    count_all: bool = False
    """`density` is over all layers, dense ones too, so that trials have equally many weights."""
    epochs: int = 6
    rate: float = 2e-3
    warm_up: float = 0.0
    """Share of the steps with a rising learning rate."""
    interval: int = 100
    share: float = 0.3
    first: float = 0.0
    """Share of the steps before the first update; none follows after `end`."""
    end: float = 0.75
    dense_epochs: int = 0
    """Epochs of dense training before."""
    start: str = "random"


@dataclass(frozen=True)
class Experiment:
    title: str
    of: str
    """Heading of the first column."""
    trials: dict[str, Trial]


MLP = Trial()
CONV = Trial(network="conv", density=0.05, epochs=1, interval=25, left_dense=(0, -1))
STATIC = replace(MLP, method="static")


def _with(base: Trial, name: str, values: tuple[float, ...]) -> dict[str, Trial]:
    return {f"{value:g}": replace(base, **{name: value}) for value in values}  # type: ignore[arg-type]


def _methods(base: Trial, *names: str) -> dict[str, Trial]:
    return {name: replace(base, method=name) for name in names}


def _tuning(density: float, epochs: int = 3) -> dict[str, Trial]:
    """Trials that start from a network trained dense for 6 epochs."""
    pruned = Trial(density=density, dense_epochs=6, start="magnitude", epochs=epochs)
    return {
        "dense, 6 epochs": Trial(method="dense"),
        "largest magnitudes, not trained on": replace(pruned, method="static", epochs=0),
        "largest magnitudes, 3 epochs, static": replace(pruned, method="static"),
        "largest magnitudes, 3 epochs, RigL": pruned,
        "the same at a quarter of the rate": replace(pruned, rate=5e-4),
        "the same, a share of 0.1": replace(pruned, share=0.1),
        "pruned little by little in 3 epochs (GMP)": replace(
            pruned, method="gmp", density=1.0, final_density=density
        ),
        "from scratch, 9 epochs, RigL": Trial(density=density, epochs=9),
    }


EXPERIMENTS: dict[str, Experiment] = {
    "interval": Experiment(
        "Steps between updates",
        "steps between updates",
        {f"{n}": replace(MLP, interval=n) for n in (10, 30, 100, 300, 1000)}
        | {"no update (static)": STATIC},
    ),
    "share": Experiment(
        "Share of the first update",
        "share of the first update",
        _with(MLP, "share", (0.1, 0.3, 0.5, 0.8)),
    ),
    "first": Experiment(
        "No update before this share of the training",
        "no update before this share of the steps",
        _with(MLP, "first", (0.0, 0.1, 0.25)),
    ),
    "end": Experiment(
        "No update after this share of the training",
        "no update after this share of the steps",
        _with(MLP, "end", (0.4, 0.75, 0.95)),
    ),
    "rate": Experiment(
        "Rates",
        "network, rate",
        {
            f"{name}, {rate:g}": replace(MLP, method=method, rate=rate)
            for name, method in (("RigL", "rigl"), ("dense", "dense"))
            for rate in (5e-4, 2e-3, 1e-2)
        },
    ),
    "warm-up": Experiment(
        "A rate that rises at first",
        "rate, share of the steps in which it rises",
        {
            f"{rate:g}, {warm:g}": replace(MLP, rate=rate, warm_up=warm)
            for rate in (2e-3, 1e-2)
            for warm in (0.0, 0.1)
        },
    ),
    "layers": Experiment(
        "Which layers stay dense, at as many weights",
        "layers",
        {
            f"{layers}, {allocation}": replace(
                MLP, left_dense=left, allocation=allocation, count_all=True
            )
            for layers, left in (("last dense", (-1,)), ("all sparse", ()))
            for allocation in ("erk", "uniform")
        },
    ),
    "tuning 0.05": Experiment("From a dense network, density 0.05", "training", _tuning(0.05)),
    "tuning 0.01": Experiment("From a dense network, density 0.01", "training", _tuning(0.01)),
    "conv 0.1": Experiment(
        "Convolutions, density 0.1",
        "method",
        _methods(replace(CONV, density=0.1), "static", "set", "rigl"),
    ),
    "conv 0.05": Experiment(
        "Convolutions, density 0.05", "method", _methods(CONV, "static", "set", "rigl")
    ),
    "conv 0.02": Experiment(
        "Convolutions, density 0.02",
        "method",
        _methods(replace(CONV, density=0.02), "static", "set", "rigl"),
    ),
    "conv layers": Experiment(
        "Which convolutions stay dense, at as many weights",
        "layers",
        {
            f"{layers}, {allocation}": replace(
                CONV, left_dense=left, allocation=allocation, count_all=True
            )
            for layers, left in (("first and last dense", (0, -1)), ("all sparse", ()))
            for allocation in ("erk", "uniform")
        },
    ),
}
