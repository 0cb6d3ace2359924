"""Reinforcement learning: wide sparse actors and critics beside dense ones, by SAC.

    python benchmarks/reinforcement.py train --contender rigl-0.1 [--task Pendulum-v1] [--json FILE]
    python benchmarks/reinforcement.py times [--rounds 40] [--json FILE]

`train` trains once and records the return of every episode; `times` measures the updates of all
contenders in turn on the same random transitions. Tasks are gymnasium's (`pip install gymnasium`,
those of MuJoCo with `pip install "mujoco<4" imageio`).

Soft actor-critic (Haarnoja et al., 2018) with two critics, target critics (moving averages) and a
learned temperature. Every network has two hidden layers; the matrix between them, with nearly all
weights, is sparse. Contenders:

    dense-wide     `--width` features (2,048)
    dense-narrow   dense, with as many weights as static-0.1
    masked-0.1     dense-wide with a mask; it trains as static-0.1, so `times` only
    static-0.1     a random pattern; static-0.05 likewise
    rigl-0.1       as static-0.1, trained by RigL; rigl-0.05 likewise
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dynsparse as ds
from dynsparse.bench.contenders import mask_layers
from dynsparse.bench.timing import spread

CONTENDERS = (
    "dense-wide", "dense-narrow", "masked-0.1", "static-0.1", "static-0.05", "rigl-0.1",
    "rigl-0.05",
)  # fmt: skip
DISCOUNT, AVERAGE, RATE, BATCH = 0.99, 0.995, 3e-4, 256


def network(inputs: int, outputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def narrow_width(inputs: int, outputs: int, width: int, density: float) -> int:
    """The width of a dense network with as many weights as a sparse one of `width`."""
    ends = inputs + outputs
    weights = density * width**2 + width * ends
    return round((math.sqrt(ends**2 + 4 * weights) - ends) / 2)


class Networks:
    """The networks of a contender, their optimizers, and the functions that step them."""

    def __init__(self, contender: str, inputs: int, actions: int, args: argparse.Namespace) -> None:
        kind, _, number = contender.partition("-")
        density = float(number) if kind != "dense" else 0.1
        self.actions = actions

        def build(entries: int, outputs: int) -> nn.Sequential:
            narrow = narrow_width(entries, outputs, args.width, density)
            width = narrow if contender == "dense-narrow" else args.width
            return network(entries, outputs, width)

        torch.manual_seed(args.seed)
        self.actor: nn.Module = build(inputs, 2 * actions)
        self.critics: nn.Module = nn.ModuleList([build(inputs + actions, 1) for _ in range(2)])
        modules = (self.actor, self.critics)
        if kind != "dense":
            generator = torch.Generator().manual_seed(args.seed)
            for module, middle in zip(modules, ("2", "*.2"), strict=True):
                ds.sparsify(module, density, include=middle, generator=generator, verbose=False)
        if kind == "masked":
            for module in modules:
                mask_layers(module)
        self.averages = AveragedModel(self.critics, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE))
        self.averages.requires_grad_(False)
        self.temperature = torch.tensor(math.log(args.temperature), requires_grad=True)
        self.tune = torch.optim.Adam([self.temperature], RATE)
        self.optimizers = [torch.optim.Adam(m.parameters(), RATE, fused=True) for m in modules]
        self.steps: list[Callable[[], Any]] = [optimizer.step for optimizer in self.optimizers]
        if kind == "rigl":
            self.steps = [
                ds.RigL(m, o, total_steps=args.steps, update_interval=args.interval).step
                for m, o in zip(modules, self.optimizers, strict=True)
            ]

    def act(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in (-1, 1), and the logarithms of their densities: [n, actions], [n]."""
        mean, spread = self.actor(observations).chunk(2, -1)
        deviation = (-5 + 3.5 * (spread.tanh() + 1)).exp()  # from e^-5 to e^2
        noise = torch.randn_like(mean)
        actions = (mean + deviation * noise).tanh()
        densities = -(noise**2) / 2 - deviation.log() - math.log(math.tau) / 2
        return actions, (densities - (1 - actions**2 + 1e-6).log()).sum(-1)

    def values(self, critics: nn.Module, observations: Tensor, actions: Tensor) -> list[Tensor]:
        both = torch.cat([observations, actions], -1)
        critics = critics.module if isinstance(critics, AveragedModel) else critics
        return [critic(both).squeeze(-1) for critic in critics]

    def update(self, batch: tuple[Tensor, ...]) -> float:
        """One step of the critics, the actor and the temperature; returns the critics' loss."""
        observations, actions, rewards, following, ends = batch
        weight = self.temperature.detach().exp()
        with torch.no_grad():
            chosen, logs = self.act(following)
            least = torch.stack(self.values(self.averages, following, chosen)).amin(0)
            targets = rewards + DISCOUNT * (1 - ends) * (least - weight * logs)
        losses = [
            functional.mse_loss(value, targets)
            for value in self.values(self.critics, observations, actions)
        ]
        self.optimizers[1].zero_grad()
        loss = losses[0] + losses[1]
        loss.backward()
        self.steps[1]()

        chosen, logs = self.act(observations)
        self.critics.requires_grad_(False)
        least = torch.stack(self.values(self.critics, observations, chosen)).amin(0)
        self.optimizers[0].zero_grad()
        (weight * logs - least).mean().backward()
        self.critics.requires_grad_(True)
        self.steps[0]()

        self.tune.zero_grad()
        (-self.temperature.exp() * (logs.detach() - self.actions).mean()).backward()
        self.tune.step()
        self.averages.update_parameters(self.critics)
        return loss.item()


class Transitions:
    """The replay buffer."""

    def __init__(self, size: int, inputs: int, actions: int) -> None:
        widths = (inputs, actions, 0, inputs, 0)
        self.parts = [torch.zeros(size, width) if width else torch.zeros(size) for width in widths]
        self.count = 0

    def add(self, *transition: Any) -> None:
        for part, seen in zip(self.parts, transition, strict=True):
            part[self.count] = torch.as_tensor(seen, dtype=torch.float32)
        self.count += 1

    def draw(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        chosen = torch.randint(self.count, (BATCH,), generator=generator)
        return tuple(part[chosen] for part in self.parts)


def train(args: argparse.Namespace) -> dict[str, Any]:
    environment = gymnasium.make(args.task)
    inputs, actions = environment.observation_space.shape[0], environment.action_space.shape[0]
    space = environment.action_space
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    networks = Networks(args.contender, inputs, actions, args)
    transitions = Transitions(args.steps, inputs, actions)
    generator = torch.Generator().manual_seed(args.seed)
    episodes: list[tuple[int, float]] = []
    observation, _ = environment.reset(seed=args.seed)
    total = 0.0
    for step in range(1, args.steps + 1):
        if step <= args.start:
            action = torch.rand(actions, generator=generator) * 2 - 1
        else:
            with torch.no_grad():
                action, _ = networks.act(torch.as_tensor(observation, dtype=torch.float32))
        given = (low + (action + 1) / 2 * (high - low)).numpy()
        following, reward, ended, cut, _ = environment.step(given)
        transitions.add(observation, action, reward, following, float(ended))
        total += float(reward)
        observation = following
        if ended or cut:
            episodes.append((step, total))
            total = 0.0
            observation, _ = environment.reset()
            mean = statistics.mean(r for _, r in episodes[-5:])
            if len(episodes) % 5 == 0:
                print(f"{args.contender} {step:6} steps, last five episodes {mean:.1f}", flush=True)
            if args.until is not None and len(episodes) >= 5 and mean >= args.until:
                break
        if step > args.start:
            networks.update(transitions.draw(generator))
    return {
        "contender": args.contender, "task": args.task, "seed": args.seed, "width": args.width,
        "steps": args.steps, "start": args.start, "interval": args.interval,
        "temperature": args.temperature,
        "weights": sum(p.numel() for p in networks.actor.parameters()),
        "episodes": episodes,
    }  # fmt: skip


def measure_times(args: argparse.Namespace) -> dict[str, Any]:
    environment = gymnasium.make(args.task)
    inputs, actions = environment.observation_space.shape[0], environment.action_space.shape[0]
    generator = torch.Generator().manual_seed(args.seed)
    transitions = Transitions(4096, inputs, actions)
    transitions.parts = [torch.randn(p.shape, generator=generator) for p in transitions.parts]
    transitions.parts[1].tanh_()
    transitions.parts[4].zero_()
    transitions.count = 4096
    networks = {name: Networks(name, inputs, actions, args) for name in args.contenders}
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(args.rounds):
        batch = transitions.draw(generator)
        for name, contender in networks.items():
            begin = time.perf_counter()
            contender.update(batch)
            seconds[name].append(time.perf_counter() - begin)
    warm = {name: spread(taken[3:]) for name, taken in seconds.items()}
    base = warm["dense-wide"].median
    return {
        "task": args.task, "width": args.width, "batch": BATCH, "rounds": args.rounds,
        "threads": torch.get_num_threads(), "interval": args.interval,
        "over dense-wide": {
            name: [base / quartile for quartile in (taken.high, taken.median, taken.low)]
            for name, taken in warm.items()
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["train", "times"])
    parser.add_argument("--task", default="Pendulum-v1")
    parser.add_argument("--contender", choices=[c for c in CONTENDERS if "masked" not in c])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5000, help="environment steps, updates")
    parser.add_argument("--until", type=float, help="stop at this mean return of five episodes")
    parser.add_argument("--start", type=int, default=500, help="random actions before training")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the entropy, at first")
    parser.add_argument("--interval", type=int, default=100, help="steps between pattern updates")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of `times`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.command == "train" and args.contender is None:
        parser.error("train needs --contender")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    measured = train(args) if args.command == "train" else measure_times(args)
    print(json.dumps({k: v for k, v in measured.items() if k != "episodes"}))
    if args.json is not None:
        args.json.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
