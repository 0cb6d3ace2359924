"""Checkpoints with any part missing or of another type or length change nothing."""

import numpy as np
import pytest
import torch
from checkpoint_files import read_parts, write_parts
from states import copied, same

import dynsparse as ds
from dynsparse.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint


def parts(kind, optimizer_kind):
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(
        ds.nn.SparseLinear(12, 8, density=0.5, generator=generator), torch.nn.Linear(8, 2)
    )
    if optimizer_kind == "Adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Pruning makes the layers resizable.
    prunes = {"final_density": 0.1} if kind == "GraNet" else {}
    trainer = getattr(ds, kind)(model, optimizer, total_steps=40, update_interval=2, **prunes)
    return {
        "model": model,
        "optimizer": optimizer,
        "trainer": trainer,
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "generators": {"own": np.random.default_rng(5)},
    }


def train(made, steps):
    for _ in range(steps):
        made["optimizer"].zero_grad()
        made["model"](torch.randn(4, 12)).square().mean().backward()
        made["trainer"].step()
        made["lr_scheduler"].step()


def snapshot(made):
    return copied(
        {
            "model": made["model"].state_dict(),
            "optimizer": made["optimizer"].state_dict(),
            "trainer": made["trainer"].state_dict(),
            "lr_scheduler": made["lr_scheduler"].state_dict(),
            "own": made["generators"]["own"].bit_generator.state,
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state()[1].tolist(),
        }
    )


WRONG = (None, "text", -3, [], {}, float("nan"), torch.zeros(2, 3))


def mutations(value, path=()):
    """Yield (path, description, mutated copy) per node: removed, or of another type or length.

    Each node takes three other types, which depend on its path.
    """
    inner = []
    if isinstance(value, dict):
        inner = list(value.items())
        for key in value:
            yield (*path, key), "dropped", {k: v for k, v in value.items() if k != key}
        yield path, "one more", {**value, "unheard of": 1}
    elif isinstance(value, (list, tuple)):
        # Six hundred numbers of Python's generator are one kind of place.
        inner = list(enumerate(value))[:3]
        yield path, "shorter", type(value)(value[:-1])
        yield path, "longer", type(value)((*value, 1))
    elif isinstance(value, torch.Tensor):
        if value.dim():
            yield path, "shorter", value[:-1].clone()
            yield path, "longer", torch.cat([value, value[:1]])
            yield path, "deeper", value[None].clone()
        yield path, "complex", value.to(torch.complex64)
    others = [w for w in WRONG if type(w) is not type(value)]
    for i in range(3):
        wrong = others[(len(str(path)) + 2 * i) % len(others)]
        yield path, f"now {wrong!r}", wrong
    for key, child in inner:
        for where, what, changed in mutations(child, (*path, key)):
            if isinstance(value, dict):
                yield where, what, {**value, key: changed}
            else:
                yield where, what, type(value)([*value[:key], changed, *value[key + 1 :]])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "optimizer"), [("GraNet", "Adam"), ("TopKAST", "SGD")])
def test_mutated_checkpoint_loads_completely_or_changes_nothing(kind, optimizer, tmp_path):
    made = parts(kind, optimizer)
    train(made, 5)
    save_checkpoint(tmp_path / "good", **made, extra={"epoch": 1})
    payload = read_parts(tmp_path / "good")
    fresh = parts(kind, optimizer)
    train(fresh, 3)
    before = snapshot(fresh)
    refused = 0
    harmful = []
    for path, what, changed in mutations(payload):
        write_parts(tmp_path / "bad", changed)
        try:
            load_checkpoint(tmp_path / "bad", **fresh)
        except CheckpointError as error:
            refused += 1
            if "\n" in str(error) or len(str(error)) > 1000:
                harmful.append(f"{path} {what}: {str(error)[:1000]!r}")
        except Exception as error:
            harmful.append(f"{path} {what}: {type(error).__name__}: {error}")
        else:
            # Taken: then a step must be possible, and nothing be left of what was before.
            try:
                train(fresh, 1)
            except Exception as error:
                harmful.append(f"{path} {what}: taken, then {type(error).__name__}: {error}")
            fresh = parts(kind, optimizer)
            torch.manual_seed(0)
            train(fresh, 3)
            before = snapshot(fresh)
            continue
        if not same(before, snapshot(fresh)):
            harmful.append(f"{path} {what}: changed")
            fresh = parts(kind, optimizer)
            train(fresh, 3)
            before = snapshot(fresh)
    assert harmful == [], "\n".join(harmful)
    assert refused > 300
