"""Steps that make a loss smaller: Muon for matrices, AdamW for all else, driven as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from draftwood.errors import InvalidRequest

QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at 0: singular values come near 1 in five steps, and stay near, not at it


@dataclass(frozen=True)
class OptimConfig:
    """Which optimiser, and its rates: `muon_lr` is of matrices under Muon, `lr` of all that AdamW takes."""

    name: Literal["muon", "adamw"] = "muon"
    lr: float = 1e-4
    muon_lr: float = 1e-3
    weight_decay: float = 0.1  # of matrices and tables; vectors (norms, biases) have none
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.95
    tables: tuple[str, ...] = ("embed", "lm_head")  # matrices with one of these in their name have a row a token

    def __post_init__(self) -> None:
        if self.name not in ("muon", "adamw"):
            raise InvalidRequest(f"The optimiser is muon or adamw, not {self.name!r}.")
        if min(self.lr, self.muon_lr) <= 0 or self.weight_decay < 0:
            raise InvalidRequest("Learning rates must be positive, the weight decay not negative.")
        if not all(0 <= beta < 1 for beta in (*self.betas, self.momentum)):
            raise InvalidRequest("Betas and momentum must be from 0 to below 1.")


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Matrices with all singular values brought near 1 (0.7 to 1.2), by Newton-Schulz steps of products only.

    [*, rows, columns]. In bfloat16 on a GPU, where that is many times as fast, and in float32 elsewhere.
    """
    a, b, c = QUINTIC
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the product with its own transpose is then the smaller one
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(Optimizer):
    """Momentum, orthogonalised: each step moves a matrix equally in all directions that its gradient has at all.

    Steps are scaled by sqrt(max(1, rows / columns)), and weights decay apart from the gradient.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(weight.dim() != 2 for group in self.param_groups for weight in group["params"]):
            raise InvalidRequest("Muon is for matrices only; give all other weights to AdamW.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every weight that has a gradient."""
        if closure is not None:
            raise InvalidRequest("Muon takes gradients that are there already, not a closure.")
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    alike.setdefault(weight.shape, []).append(weight)
            for weights in alike.values():
                self._move(weights, group)

    def _move(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Weights of one shape together: their products are too small to keep a GPU busy one by one."""
        gradients = torch.stack([weight.grad for weight in weights])  # type: ignore[misc]
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        momenta = [self.state[weight]["momentum"] for weight in weights]
        momentum = torch.stack(momenta).lerp_(gradients, 1 - group["momentum"])
        ahead = gradients.lerp(momentum, group["momentum"])  # Nesterov
        rows, columns = weights[0].shape
        moves = orthogonalise(ahead) * (-group["lr"] * max(1.0, rows / columns) ** 0.5)
        for weight, kept, late, move in zip(weights, momenta, momentum, moves, strict=True):
            kept.copy_(late)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(move)


class Optimizers:
    """Several optimisers as one, whose rates follow one factor."""

    def __init__(self, parts: Iterable[Optimizer]) -> None:
        self.parts = tuple(parts)
        self._full = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def parameters(self) -> list[Tensor]:
        """All weights that are trained."""
        return [weight for part in self.parts for group in part.param_groups for weight in group["params"]]

    def set_factor(self, factor: float) -> None:
        """Make every rate this part of its full one."""
        for part, rates in zip(self.parts, self._full, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def step(self) -> None:
        """One update of all."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """The states of all, in order."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from states of optimisers built in the same way."""
        if len(states) != len(self.parts):
            raise InvalidRequest(f"The saved run had {len(states)} optimisers, this one has {len(self.parts)}.")
        for part, state in zip(self.parts, states, strict=True):
            try:
                part.load_state_dict(state)
            except ValueError as error:
                raise InvalidRequest(f"The saved optimiser is of another module: {error}.") from None


def build_optimizer(module: nn.Module, config: OptimConfig) -> Optimizers:
    """The optimisers of a module's trainable weights: matrices to Muon if asked for, tables and vectors to AdamW."""
    embeddings = {
        id(weight)
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        for weight in part.parameters(recurse=False)
    }
    matrices, tables, vectors = [], [], []
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            continue
        if weight.dim() < 2:
            vectors.append(weight)
        elif weight.dim() > 2 or id(weight) in embeddings or any(word in name for word in config.tables):
            tables.append(weight)
        else:
            matrices.append(weight)
    if not (matrices or tables or vectors):
        raise InvalidRequest("The module has no weight that can be trained.")
    muon = config.name == "muon"
    decayed = tables if muon else matrices + tables
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    parts: list[Optimizer] = [AdamW(groups, lr=config.lr, betas=config.betas)] if groups else []
    if muon and matrices:
        parts.append(Muon(matrices, config.muon_lr, config.momentum, config.weight_decay))
    return Optimizers(parts)
