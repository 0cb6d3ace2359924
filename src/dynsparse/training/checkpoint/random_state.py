"""The states of random generators as plain types and tensors, and back."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dynsparse._core.checks import describe_error

Generator = torch.Generator | np.random.Generator | random.Random


def state_of(generator: Generator) -> dict[str, Any]:
    """The state of one generator, with its kind."""
    if isinstance(generator, torch.Generator):
        return {"kind": "torch", "state": generator.get_state()}
    if isinstance(generator, np.random.Generator):
        return {"kind": "numpy", "state": _arrays_to_tensors(generator.bit_generator.state)}
    if isinstance(generator, random.Random):
        return {"kind": "python", "state": generator.getstate()}
    raise TypeError(
        "expected a torch.Generator, a numpy.random.Generator or a random.Random, "
        f"got {type(generator).__name__}"
    )


def check(generator: Generator, state: dict[str, Any], name: str) -> None:
    """Raise if `state` is not of this kind of generator."""
    current = state_of(generator)
    bits = [_bit_generator_name(generator_state) for generator_state in (current, state)]
    if current["kind"] != state["kind"] or bits[0] != bits[1]:
        raise ValueError(f"the generator {name!r} was of another kind when it was saved")
    if isinstance(generator, torch.Generator):
        trial: Generator = torch.Generator(generator.device)
    else:
        trial = copy.deepcopy(generator)
    _try(lambda: restore(trial, state), f"the state of the generator {name!r}")


def restore(generator: Generator, state: dict[str, Any]) -> None:
    """Restore the state that `state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state["state"])
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _tensors_to_arrays(state["state"])
    else:
        generator.setstate(state["state"])


def global_states() -> dict[str, Any]:
    """The global generators of torch (CPU and every CUDA device), NumPy and Python."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": _arrays_to_tensors(np.random.get_state(legacy=False)),
        "python": random.getstate(),
    }


def check_global_states(states: dict[str, Any]) -> None:
    """Raise ValueError unless `restore_global_states` takes `states`."""

    def restore_copies() -> None:
        torch.Generator().set_state(states["torch"])
        np.random.RandomState().set_state(_tensors_to_arrays(states["numpy"]))
        random.Random().setstate(states["python"])
        if not all(isinstance(state, torch.Tensor) for state in states["cuda"]):
            raise TypeError("expected tensors of CUDA's generators")

    _try(restore_copies, "the random state")


def restore_global_states(states: dict[str, Any]) -> None:
    """Restore the global generators; CUDA's only on a machine with as many devices."""
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    np.random.set_state(_tensors_to_arrays(states["numpy"]))
    random.setstate(states["python"])


def _bit_generator_name(state: dict[str, Any]) -> Any:
    if state["kind"] != "numpy" or not isinstance(state["state"], dict):
        return None
    return state["state"].get("bit_generator")


def _try(restore: Callable[[], None], what: str) -> None:
    try:
        restore()
    except Exception as error:  # of any kind: the values are untrusted
        raise ValueError(f"{what} is damaged ({describe_error(error)})") from None


def _arrays_to_tensors(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _arrays_to_tensors(value) for key, value in state.items()}
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def _tensors_to_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _tensors_to_arrays(value) for key, value in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state
