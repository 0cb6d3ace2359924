"""Valid calls of trainers, schedules, budgets, histories and checkpoints."""

from __future__ import annotations

import copy

import torch
from recipes import Recipe, call, of
from recipes_parts import X, folder, generator, model, pattern, rewiring

import dynsparse as ds
from dynsparse import training


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def trained(kind, **more):
    """Make a recipe of a trainer's arguments, given model and optimizer; it then takes one step."""

    def run(model, optimizer, **named):
        trainer = kind(model, optimizer, **named)
        optimizer.zero_grad()
        model(X).square().sum().backward()
        trainer.step()

    def make():
        net = model()
        return {"model": net, "optimizer": optimizer_of(net)} | {k: v() for k, v in more.items()}

    return Recipe(run, make)


def trainer():
    net = model()
    made = ds.RigL(net, optimizer_of(net), total_steps=10, update_interval=1, drop_fraction=0.3)
    net(X).square().sum().backward()
    made.step()
    return made


def ready():
    """Make a trainer whose model has gradients."""
    net = model()
    made = ds.Static(net, optimizer_of(net))
    net(X).square().sum().backward()
    return made


def pairs():
    return [(X, torch.ones(3, 8))]


def patterns():
    return {"a": pattern()}


def survey():
    history = training.LastStep()
    history.observe("a", pairs())
    return training.budgets.Survey(
        step=2,
        schedule=training.CosineSchedule(10, 1),
        patterns=patterns(),
        scores=lambda name: torch.rand(6),
        history=history,
        regrow_dropped=False,
    )


def begun(kind, *args):
    def make():
        made = kind(*args)
        made.begin(patterns())
        return made

    return make


def checkpoint():
    net = model()
    path = folder() / "c.ckpt"
    training.save_checkpoint(path, model=net, optimizer=optimizer_of(net))
    return path


STEPS = {"total_steps": lambda: 10, "update_interval": lambda: 1}
SHARE = STEPS | {"drop_fraction": lambda: 0.3}
GRADUAL = STEPS | {
    "start_fraction": lambda: 0.0,
    "end_fraction": lambda: 0.75,
    "scope": lambda: "layer",
    "allocation": lambda: "uniform",
    "densities": lambda: {"0": 0.1},
}
SEEDED = {"seed": lambda: 1}

RECIPES = {
    "dynsparse.Static": trained(ds.Static),
    "dynsparse.training.MuonAdamW": Recipe(
        lambda **named: training.MuonAdamW(**named).step(),
        lambda: {
            "model": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)),
            "lr": 0.01,
            "weight_decay": 0.1,
            "adamw": ["1"],
            "momentum": 0.9,
            "betas": (0.9, 0.99),
        },
    ),
    "dynsparse.training.MuonAdamW.step": of(
        lambda: training.MuonAdamW(torch.nn.Sequential(torch.nn.Linear(4, 4))),
        "step",
        closure=lambda: lambda: 1.0,
    ),
    "dynsparse.RigL": trained(
        ds.RigL,
        **SHARE,
        pooling=lambda: "sum",
        drop_score=lambda: training.magnitude,
        regrow_dropped=lambda: False,
        initial_value=lambda: 0.5,
    ),
    "dynsparse.SET": trained(
        ds.SET, **SHARE, **SEEDED, drop_score=lambda: training.magnitude, initial_value=lambda: 0.5
    ),
    "dynsparse.SNFS": trained(
        ds.SNFS, **SHARE, momentum=lambda: 0.9, window=lambda: 2, redistribute=lambda: False
    ),
    "dynsparse.MEST": trained(
        ds.MEST, **SHARE, **SEEDED, gradient_weight=lambda: 0.1, soft_memory_bound=lambda: False
    ),
    "dynsparse.DeepR": trained(
        ds.DeepR, **STEPS, **SEEDED, l1=lambda: 1e-3, temperature=lambda: 0.1
    ),
    "dynsparse.GMP": trained(ds.GMP, **GRADUAL, final_density=lambda: 0.1),
    "dynsparse.GraNet": trained(
        ds.GraNet, **GRADUAL, final_density=lambda: 0.1, drop_fraction=lambda: 0.3
    ),
    "dynsparse.TopKAST": trained(
        ds.TopKAST,
        **SHARE,
        **SEEDED,
        forward_fraction=lambda: 0.5,
        exploration=lambda: 1e-3,
    ),
    "dynsparse.training.SparseTrainer": trained(
        training.SparseTrainer,
        schedule=lambda: training.CosineSchedule(10, 1),
        growth=training.RandomGrowth,
        drop_score=lambda: training.magnitude,
        regrow_dropped=lambda: False,
        initial_value=lambda: 0.0,
        budget=training.LayerBudget,
        history=training.LastStep,
    ),
    "dynsparse.training.SparseTrainer.load_state_dict": of(
        trainer, "load_state_dict", state=lambda: trainer().state_dict()
    ),
    "dynsparse.training.repair": Recipe(
        training.repair,
        lambda: {
            "model": (made := model()),
            "dense": ds.densify(copy.deepcopy(made)),
            "calibration": [X],
            "lr": 0.1,
            "verbose": False,
        },
    ),
    "dynsparse.training.scaled_step": call(
        training.scaled_step,
        trainer=ready,
        scaler=lambda: torch.amp.GradScaler("cpu", enabled=False),
    ),
    "dynsparse.training.ConstantSchedule": call(training.ConstantSchedule, **SHARE),
    "dynsparse.training.CosineSchedule": call(
        training.CosineSchedule,
        **SHARE,
        end_fraction=lambda: 0.7,
        rounding=lambda: "up",
        zero_steps=lambda: 2,
        phase_delay=lambda: 0.1,
        period=lambda: 0.5,
    ),
    "dynsparse.training.ElasticSchedule": call(
        training.ElasticSchedule,
        **SHARE,
        end_fraction=lambda: 0.7,
        rounding=lambda: "up",
        zero_steps=lambda: 2,
        phase_delay=lambda: 0.1,
        period=lambda: 0.5,
    ),
    "dynsparse.training.GradualSchedule": call(
        training.GradualSchedule,
        **SHARE,
        start_fraction=lambda: 0.1,
        end_fraction=lambda: 0.7,
    ),
    "dynsparse.training.Budget": call(training.Budget),
    "dynsparse.training.LayerBudget": call(training.LayerBudget),
    "dynsparse.training.GlobalBudget": call(training.GlobalBudget),
    "dynsparse.training.SoftBudget": call(training.SoftBudget),
    "dynsparse.training.MomentumBudget": call(training.MomentumBudget),
    "dynsparse.training.GradualBudget": call(
        training.GradualBudget,
        final_density=lambda: 0.1,
        scope=lambda: "layer",
        allocation=lambda: "uniform",
        densities=lambda: {"a": 0.1},
    ),
    "dynsparse.training.GlobalBudget.counts": of(
        begun(training.GlobalBudget), "counts", survey=survey
    ),
    "dynsparse.training.Counts": call(training.Counts, drop=lambda: 1, grow=lambda: 1),
    "dynsparse.training.DenseMomentum": call(training.DenseMomentum, momentum=lambda: 0.9),
    "dynsparse.training.WindowMomentum": call(
        training.WindowMomentum, momentum=lambda: 0.9, window=lambda: 3
    ),
    "dynsparse.training.History": call(training.History),
    "dynsparse.training.LastStep": call(training.LastStep),
    "dynsparse.training.Growth": call(training.Growth),
    "dynsparse.training.NoGrowth": call(training.NoGrowth),
    "dynsparse.training.GradientGrowth": call(training.GradientGrowth, pooling=lambda: "avg"),
    "dynsparse.training.RandomGrowth": call(training.RandomGrowth, seed=lambda: 1),
    "dynsparse.training.GradientStep": call(training.GradientStep, scale=lambda: 1.0),
    "dynsparse.training.MagnitudeGradient": call(
        training.MagnitudeGradient, gradient_weight=lambda: 0.1
    ),
    "dynsparse.training.Telemetry": call(training.Telemetry, trainer=trainer),
    "dynsparse.training.lowest": call(
        training.lowest, scores=lambda: torch.rand(6), count=lambda: 2
    ),
    "dynsparse.training.magnitude": call(training.magnitude, values=lambda: torch.rand(6, 2, 2)),
    "dynsparse.training.rewire_state": Recipe(
        training.rewire_state,
        lambda: {
            "optimizer": (net := optimizer_of(model())),
            "values": net.param_groups[0]["params"][0],
            "rewiring": rewiring(),
        },
    ),
    "dynsparse.training.save_checkpoint": Recipe(
        training.save_checkpoint,
        lambda: {
            "path": folder() / "c.ckpt",
            "model": (net := model()),
            "optimizer": optimizer_of(net),
            "generators": {"a": generator()},
        },
        (OSError,),
    ),
    "dynsparse.training.load_checkpoint": Recipe(
        training.load_checkpoint,
        lambda: {"path": checkpoint(), "model": (net := model()), "optimizer": optimizer_of(net)},
        (OSError,),
    ),
}
