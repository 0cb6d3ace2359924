"""One optimizer for a model that is partly sparse: Muon for dense matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from dynsparse._core.checks import check_not_negative, check_types, check_within, shorten
from dynsparse.nn.candidates import check_patterns, find_candidates, matches_name
from dynsparse.nn.models import param_groups


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the dense matrices of hidden layers, AdamW for everything else.

    Muon (Jordan et al. 2024) makes the update of a matrix orthogonal, which needs the whole matrix.
    So AdamW trains sparse values, as well as embeddings and heads tied to them, biases and norms.
    Updates of Muon are scaled to the size of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM
    Training", section 2.2), and both use one rate. Trainers, learning-rate schedulers and
    checkpoints take it like any optimizer; `param_groups` are Muon's, and AdamW's with and without
    weight decay.

        optimizer = ds.training.MuonAdamW(model, lr=1e-3, adamw=["lm_head"])
        trainer = ds.RigL(model, optimizer, total_steps=10_000)

    Args:
        model: dense matrices are the weights of its linear layers, found as by `sparsify`.
        lr: the learning rate.
        weight_decay: of matrices and sparse values, decoupled; biases and norms do not decay.
        adamw: name patterns, as in `sparsify`, of layers whose matrices AdamW trains, such as an
            output layer that is not tied.
        momentum: of Muon, with Nesterov's correction.
        betas: of AdamW.

    Raises:
        ValueError: a pattern that matches no dense matrix, or no dense matrix for Muon.
        RuntimeError: torch before 2.9, which has no Muon.
    """

    @check_types
    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        adamw: str | Iterable[str] = (),
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"MuonAdamW needs torch 2.9 or later, this is {torch.__version__}")
        check_not_negative("lr", lr)
        check_within("momentum", momentum, "[0, 1)")
        matrices = _find_matrices(model, check_patterns("adamw", adamw))
        if not matrices:
            raise ValueError(
                "the model has no dense matrix for Muon: use torch.optim.AdamW with "
                "dynsparse.param_groups"
            )
        chosen = {id(matrix) for matrix in matrices}
        rest = param_groups(model, weight_decay=weight_decay)
        for group in rest:
            group["params"] = [p for p in group["params"] if id(p) not in chosen]
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr, betas),
        )
        muon, adam = self._optimizers
        super().__init__([*muon.param_groups, *adam.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both; returns what `closure` returned."""
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(f"closure must be a function, got {shorten(closure)}")
            with torch.enable_grad():
                loss = closure()
        muon, adam = self._optimizers
        # Loading and copying replace groups and state.
        muon.param_groups, adam.param_groups = self.param_groups[:1], self.param_groups[1:]
        for optimizer in (muon, adam):
            optimizer.state = self.state
            optimizer.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_optimizers": self._optimizers}


def _find_matrices(model: nn.Module, adamw: list[str]) -> list[nn.Parameter]:
    """The weights of the linear layers that train, except embeddings and the layers of `adamw`."""
    layers = [
        candidate
        for candidate in find_candidates(model).values()
        if candidate.parameter.dim() == 2 and candidate.parameter.requires_grad
    ]
    for pattern in adamw:
        if not any(matches_name(pattern, candidate.name) for candidate in layers):
            raise ValueError(f"adamw: the pattern {pattern!r} matches no dense matrix of the model")
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    named = {
        id(candidate.parameter)
        for candidate in layers
        if any(matches_name(pattern, candidate.name) for pattern in adamw)
    }
    matrices: dict[int, Any] = {
        id(candidate.parameter): candidate.parameter
        for candidate in layers
        if id(candidate.parameter) not in tables | named
    }
    return list(matrices.values())
