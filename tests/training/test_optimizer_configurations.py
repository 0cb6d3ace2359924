"""State of torch's optimizers, in every configuration, follows pattern updates.

Checked by position: a connection in both patterns keeps its state, a new one has the state of a
new weight.
"""

import inspect

import pytest
import torch

import dynsparse as ds
from dynsparse.nn import SparseLinear

LAYER = 24, 20

OPTIONS = {
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.1},
        {"momentum": 0.9, "nesterov": True},
    ],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.01}],
    "RAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.01}],
    "Adamax": [{}],
    "Adadelta": [{}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.25, "lr_decay": 0.01}],
    "ASGD": [{}],
    "RMSprop": [{}, {"momentum": 0.5}, {"momentum": 0.5, "centered": True}],
    "Rprop": [{}],
    "Adafactor": [{}],
}
SWITCHES = [{}, *({name: True} for name in ("maximize", "foreach", "fused"))]
NUMBERS = [{"weight_decay": 0.01}, {"lr": torch.tensor(0.01)}]
INITIAL = {"Adagrad": {"sum": "initial_accumulator_value"}, "Rprop": {"step_size": "lr"}}


def configurations():
    """Return (class, options): each of OPTIONS with each flag and number that the class accepts."""
    for name, cases in OPTIONS.items():
        kind = getattr(torch.optim, name)
        takes = inspect.signature(kind).parameters
        for options in cases:
            for extra in (*SWITCHES, *NUMBERS):
                if not extra.keys() <= takes.keys() or extra.keys() & options.keys():
                    continue
                merged = {"lr": 0.01, **options, **extra}
                try:
                    kind([torch.nn.Parameter(torch.zeros(2))], **merged)
                except (RuntimeError, ValueError):  # a combination that torch refuses
                    continue
                yield name, merged


def label(case):
    name, options = case
    return "-".join([name, *(k for k in options if k != "lr" or torch.is_tensor(options[k]))])


def dense_states(layer, optimizer):
    """Return each state with an entry per block, by flat position: [all blocks, ...]."""
    pattern, found = layer.pattern, {}
    for key, tensor in optimizer.state[layer.values].items():
        if torch.is_tensor(tensor) and tensor.dim() and len(tensor) == pattern.nnz:
            found[key] = tensor.new_zeros(pattern.total, *tensor.shape[1:])
            found[key][pattern.flat] = tensor
    return found


def present_mask(pattern):
    """Return the mask of present blocks: bool [all blocks]."""
    return torch.zeros(pattern.total, dtype=torch.bool).index_fill(0, pattern.flat, True)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["RigL", "GMP"])  # sizes that stay and that change
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("case", list(configurations()), ids=label)
def test_state_follows_by_position(case, block_size, algorithm):
    name, options = case
    generator = torch.Generator().manual_seed(0)
    layer = SparseLinear(*LAYER, 0.6, block_size, generator=generator)
    optimizer = getattr(torch.optim, name)(layer.parameters(), **options)
    sizes = {"final_density": 0.3} if algorithm == "GMP" else {}
    trainer = getattr(ds, algorithm)(layer, optimizer, total_steps=12, update_interval=3, **sizes)
    before = {}
    take = trainer._finish_step

    def remember():
        before.clear()
        before.update(dense_states(layer, optimizer), mask=present_mask(layer.pattern))
        return take()

    trainer._finish_step = remember
    checked = 0
    for _ in range(10):
        optimizer.zero_grad()
        x = torch.randn(16, LAYER[0], generator=generator)
        layer(x).square().mean().backward()
        if not trainer.step():
            continue
        mask = present_mask(layer.pattern)
        kept, grown = before["mask"] & mask, mask & ~before["mask"]
        assert kept.any()
        after = dense_states(layer, optimizer)
        assert after.keys() == before.keys() - {"mask"}
        for key, state in after.items():
            option = INITIAL.get(name, {}).get(key)
            fresh = 0.0 if option is None else float(optimizer.param_groups[0][option])
            assert torch.equal(state[kept], before[key][kept]), key
            assert (state[grown] == fresh).all(), key
            checked += 1
    assert checked or (name == "SGD" and "momentum" not in options)
