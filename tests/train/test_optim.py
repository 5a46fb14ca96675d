"""Muon makes matrices nearly orthogonal and losses small; who gets which optimiser; the schedules."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from draftwood.errors import InvalidRequest
from draftwood.train.optim import Muon, OptimConfig, build_optimizer, orthogonalise
from draftwood.train.schedule import Schedule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.inner = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.lm_head = nn.Linear(6, 9, bias=False)
        self.tied = nn.Linear(4, 9, bias=False)
        self.tied.weight = self.table.weight


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5)])
def test_orthogonalise_keeps_directions_and_levels_sizes(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, sizes, v = torch.linalg.svd(matrix, full_matrices=False)
    matrix = u @ torch.diag(torch.linspace(1, 50, len(sizes))) @ v
    found = orthogonalise(matrix)
    levelled = torch.linalg.svdvals(found)
    assert levelled.min() > 0.6
    assert levelled.max() < 1.3
    inner = u.T @ found @ v.T  # diagonal, if the directions are the same
    assert (inner - torch.diag(inner.diag())).abs().max() < 1e-4


def test_one_step_of_muon_is_its_formula() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 2))
    before, gradients = weight.detach().clone(), [torch.randn(8, 2), torch.randn(8, 2)]
    optimizer = Muon([weight], lr=0.1, momentum=0.95, weight_decay=0.5)
    expected, momentum = before, torch.zeros(8, 2)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        ahead = 0.05 * gradient + 0.95 * momentum
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 2.0 * orthogonalise(ahead)
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_toy_loss_falls(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    inputs, outputs = torch.randn(64, 8), torch.randn(64, 8) @ torch.randn(8, 8) * 0.3
    optimizer = build_optimizer(module, OptimConfig(name, lr=1e-2, muon_lr=2e-2, weight_decay=0.0))  # type: ignore[arg-type]
    seen = []
    for _ in range(150):
        loss = (module(inputs) - outputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    assert seen[-1] < 0.5 * seen[0]


def test_who_gets_which_optimiser() -> None:
    net = Net()
    adam, muon = build_optimizer(net, OptimConfig(weight_decay=0.2)).parts
    assert isinstance(adam, AdamW)
    assert isinstance(muon, Muon)
    assert [id(weight) for weight in muon.param_groups[0]["params"]] == [id(net.inner.weight)]
    tables, vectors = adam.param_groups
    assert {id(weight) for weight in tables["params"]} == {id(net.table.weight), id(net.lm_head.weight)}
    assert {id(weight) for weight in vectors["params"]} == {id(net.inner.bias), id(net.norm.weight), id(net.norm.bias)}
    assert (tables["weight_decay"], vectors["weight_decay"], muon.param_groups[0]["weight_decay"]) == (0.2, 0.0, 0.2)
    (alone,) = build_optimizer(net, OptimConfig("adamw")).parts
    assert isinstance(alone, AdamW)
    assert sum(len(group["params"]) for group in alone.param_groups) == 6


def test_rates_follow_the_factor_from_the_full_ones() -> None:
    optimizer = build_optimizer(Net(), OptimConfig(lr=0.5, muon_lr=4.0))
    for factor in (0.5, 0.25, 1.0):
        optimizer.set_factor(factor)
        rates = [group["lr"] for part in optimizer.parts for group in part.param_groups]
        assert rates == [0.5 * factor, 0.5 * factor, 4.0 * factor]


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="matrices only"):
        Muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(InvalidRequest, match="no weight"):
        build_optimizer(Net().requires_grad_(False), OptimConfig())
    for bad in ({"name": "sgd"}, {"lr": 0.0}, {"weight_decay": -1.0}, {"betas": (0.9, 1.0)}):
        with pytest.raises(InvalidRequest):
            OptimConfig(**bad)
    states = build_optimizer(Net(), OptimConfig()).state_dict()
    with pytest.raises(InvalidRequest, match="optimisers"):
        build_optimizer(Net(), OptimConfig("adamw")).load_state_dict(states)
    with pytest.raises(InvalidRequest, match="another module"):
        build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), OptimConfig()).load_state_dict(states)


def test_schedules() -> None:
    cosine = Schedule("cosine", warmup=0.1, floor=0.1)
    rates = [cosine.lr_at(step, 100) for step in range(100)]
    assert rates[:10] == [(step + 1) / 10 for step in range(10)]
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert 0.1 < rates[-1] < 0.11
    wsd = Schedule("wsd", warmup=0.1, decay=0.2)
    rates = [wsd.lr_at(step, 100) for step in range(100)]
    assert rates[9:81] == [1.0] * 72
    assert rates[80:] == pytest.approx([1 - i / 20 for i in range(20)])
    assert [Schedule("constant", warmup=0.5).lr_at(step, 4) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert all(Schedule(kind).lr_at(0, 1) > 0 for kind in ("cosine", "wsd", "constant"))
    for bad in ({"kind": "steps"}, {"warmup": 0.9}, {"floor": 2.0}, {"decay": -0.1}):
        with pytest.raises(InvalidRequest):
            Schedule(**bad)
