"""Find the circuits of two tasks in a weight-sparse transformer and in a dense one.

After Gao et al. 2025, "Weight-sparse transformers have interpretable circuits". The models of
examples/weight_sparse_gpt.py learn lines such as 'tgqa' or [[pd]]. The tasks are to close a string
with the quote that opened it, and a list with as many brackets. Every channel has a trained gate,
and training penalizes open gates; a closed gate replaces its channel by the mean. Gates are ranked
by their parameters, and as few are opened as keep the task's loss below a limit. These are the
circuit: its nodes are channels, its edges the weights between them.

    python benchmarks/circuits.py --width 256 --density 0.02
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import weight_sparse_gpt as example

NEW_LINE = 10
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LIMIT = 0.15  # loss of a task in nats, as in the paper
TESTS = 4  # batches
LAYERS, HEADS = 2, 8

Gate = Callable[[str, Tensor], Tensor]


def make_text(lines: int, seed: int) -> Tensor:
    """Bytes: strings in single or double quotes, and lists in one or two pairs of brackets."""
    rng, made = random.Random(seed), []
    for _ in range(lines):
        opening, closing = rng.choice([("'", "'"), ('"', '"'), ("[", "]"), ("[[", "]]")])
        made.append(opening + "".join(rng.choices(LETTERS, k=rng.randint(1, 6))) + closing)
    return torch.frombuffer(bytearray("\n".join(made).encode()), dtype=torch.uint8)


def ends_of_strings(tokens: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Mask of the positions before a closing quote, [batch, length - 1], and the two bytes to
    choose from."""
    now, after = tokens[:, 1:], tokens[:, 1:].roll(-1, -1) == NEW_LINE
    after[:, -1] = False
    closes = ((now == ord("'")) | (now == ord('"'))) & after
    return closes & _opened_here(tokens), (ord("'"), ord('"'))


def ends_of_lists(tokens: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """As `ends_of_strings`, after the first closing bracket: another one or the line's end."""
    closes = tokens == ord("]")
    first = closes[:, :-1] & ~closes.roll(1, -1)[:, :-1]
    return first & _opened_here(tokens), (ord("]"), NEW_LINE)


def _opened_here(tokens: Tensor) -> Tensor:
    """Sequences begin anywhere, so the first line may lack its first characters."""
    return ((tokens == NEW_LINE).cumsum(-1) > 0)[:, :-1]


TASKS = {"quotes": ends_of_strings, "brackets": ends_of_lists}


def logits_of(model: nn.Module, tokens: Tensor, gate: Gate) -> Tensor:
    """Logits of tokens [batch, length + 1], with a gate on each channel that a weight reads or
    writes."""
    logits: list[Tensor] = []
    handles = [model.head.register_forward_hook(lambda _, args, out: logits.append(out))]

    def before(layer: nn.Module, name: str) -> None:
        hook = layer.register_forward_pre_hook(lambda _, args: (gate(name, args[0]),))
        handles.append(hook)

    for number, block in enumerate(model.blocks):
        before(block.qkv, f"{number} attention reads")
        name = f"{number} attention"
        hook = block.qkv.register_forward_hook(lambda _, args, out, name=name: gate(name, out))
        handles.append(hook)
        before(block.out, f"{number} attention writes")
        before(block.up, f"{number} MLP reads")
        before(block.down, f"{number} MLP")
    before(model.head, "head reads")
    try:
        model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return logits[0]


def loss_of_task(model: nn.Module, tokens: Tensor, task: str, gate: Gate) -> Tensor:
    """Cross-entropy of the choice between the two bytes."""
    at, choice = TASKS[task](tokens)
    logits = logits_of(model, tokens, gate)[at][:, choice]
    return cross_entropy(logits, (tokens[:, 1:][at] == choice[1]).long())


class Gates(nn.Module):
    """A gate for every channel, open where its parameter is positive. The gradient is that of the
    sigmoid (straight-through)."""

    def __init__(self, means: dict[str, Tensor]) -> None:
        super().__init__()
        self.means = means
        self.names = {name: f"gate{number}" for number, name in enumerate(means)}
        for name, attribute in self.names.items():
            setattr(self, attribute, nn.Parameter(torch.full_like(means[name], 1.0)))

    def of(self, name: str) -> Tensor:
        return getattr(self, self.names[name])

    def forward(self, name: str, x: Tensor) -> Tensor:
        soft = self.of(name).sigmoid()
        open_ = (self.of(name) > 0).float() + soft - soft.detach()
        return self.means[name] + open_ * (x - self.means[name])

    def share(self) -> Tensor:
        """Mean of the gates' sigmoids: a soft share of open gates."""
        return torch.cat([self.of(name).sigmoid() for name in self.names]).mean()

    def count(self) -> int:
        return sum(int((self.of(name) > 0).sum()) for name in self.names)


@torch.no_grad()
def mean_activations(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    means: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> Tensor:
        means[name] = means.get(name, 0) + x.mean((0, 1)) / len(batches)
        return x

    for tokens in batches:
        logits_of(model, tokens, note)
    return means


def list_batches(data: Tensor, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [example.sample(data, generator) for _ in range(count)]


@torch.no_grad()
def mean_loss(model: nn.Module, gate: Gate, tests: list[Tensor], task: str) -> float:
    return statistics.fmean(float(loss_of_task(model, tokens, task, gate)) for tokens in tests)


def find_circuit(model: nn.Module, data: Tensor, task: str, steps: int, seed: int) -> Gates | None:
    """Find a small circuit; None if the model does not solve the task. The penalty on open gates
    grows while the task's loss is well below the limit, and falls otherwise."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    gates = Gates(mean_activations(model, list_batches(data, 16, seed)))
    optimizer = torch.optim.Adam(gates.parameters(), lr=0.05, betas=(0.9, 0.95))
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    push, average = 0.01, 0.0
    for tokens in list_batches(data, steps, seed + 2):
        optimizer.zero_grad()
        loss = loss_of_task(model, tokens, task, gates)
        (loss + push * gates.share()).backward()
        optimizer.step()
        decay.step()
        average = 0.9 * average + 0.1 * loss.item()
        push *= 1.05 if average < 0.8 * LIMIT else 1 / 1.05
    tests = list_batches(data, TESTS, seed + 1)
    close_smallest(model, gates, tests, task)
    return gates if mean_loss(model, gates, tests, task) <= LIMIT else None


@torch.no_grad()
def close_smallest(model: nn.Module, gates: Gates, tests: list[Tensor], task: str) -> None:
    """Keep as few gates open, largest parameters first, as keep the loss below the limit."""
    ordered = torch.cat([gates.of(name) for name in gates.names]).sort(descending=True).values
    before = {name: gates.of(name).clone() for name in gates.names}

    def open_first(count: int) -> None:
        for name in gates.names:
            gates.of(name).copy_(before[name] - (ordered[count - 1] - 1e-6))

    low, high = 1, len(ordered)
    while low < high:
        middle = (low + high) // 2
        open_first(middle)
        if mean_loss(model, gates, tests, task) <= LIMIT:
            high = middle
        else:
            low = middle + 1
    open_first(high)


def weight_of(layer: nn.Module) -> Tensor:
    return (layer.to_dense() if hasattr(layer, "to_dense") else layer.weight).detach()


def edges_of(model: nn.Module, gates: Gates) -> int:
    """Number of nonzero weights between open gates. A block's output counts where an open gate
    reads it."""
    is_open = {name: gates.of(name) > 0 for name in gates.names}
    count, read_later = 0, is_open["head reads"].clone()

    def between(layer: nn.Module, to: Tensor, source: Tensor) -> int:
        return int((weight_of(layer)[to][:, source] != 0).sum())

    for number in reversed(range(len(model.blocks))):
        block = model.blocks[number]
        hidden, reads = is_open[f"{number} MLP"], is_open[f"{number} MLP reads"]
        count += between(block.down, read_later, hidden) + between(block.up, hidden, reads)
        read_later |= reads
        writes, qkv = is_open[f"{number} attention writes"], is_open[f"{number} attention"]
        reads = is_open[f"{number} attention reads"]
        count += between(block.out, read_later, writes) + between(block.qkv, qkv, reads)
        read_later |= reads
    return count


def train(method: str, density: float, width: int, steps: int, data: Tensor, seed: int):
    """Train a model; a dense one is method "keep" at density 1."""
    torch.manual_seed(seed)
    how, density = ("keep", 1.0) if method == "dense" else (method, density)
    # A neuron has only five weights: keeping its largest four would leave little to move.
    model, trainer = example.make(how, density, steps, width, LAYERS, HEADS, 0.25, least=0)
    example.train(model, trainer, data, steps, seed, report=250)
    return model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["rigl", "dense"])
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2500, help="training steps of the model")
    parser.add_argument("--gate-steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=Path, help="also append the JSON lines to this file")
    args = parser.parse_args(arguments)
    data, held_out = make_text(100_000, 0), make_text(20_000, 1)
    for seed in args.seeds:
        for method in args.methods:
            model = train(method, args.density, args.width, args.steps, data, seed)
            tests = list_batches(held_out, TESTS, seed)
            with torch.no_grad():
                loss = statistics.fmean(float(model(tokens)) for tokens in tests)
            for task in TASKS:
                of_task = mean_loss(model, lambda name, x: x, tests, task)
                gates = find_circuit(model, held_out, task, args.gate_steps, seed)
                row = {"seed": seed, "method": method, "loss": loss, "task": task, "of": of_task}
                if gates is not None:
                    row |= {"nodes": gates.count(), "edges": edges_of(model, gates)}
                line = json.dumps(row)
                print(line, flush=True)
                if args.output:
                    with args.output.open("a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main()
