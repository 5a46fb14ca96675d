"""Losses against plain float64 formulas, their gradients against finite differences, chunks against no chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from draftwood.errors import InvalidRequest
from draftwood.train import losses

ROWS, TOKENS = 7, 11
MASSES = [None, 0.0, 0.3]


def example(mass: float | None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    p = 2 * torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)
    q = 2 * torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)
    targets = torch.randint(TOKENS, (ROWS,), generator=generator)
    targets[2] = -1
    outside = None if mass is None else mass * torch.rand(ROWS, generator=generator, dtype=torch.float64).to(dtype)
    return p.to(dtype), q.to(dtype), targets, outside


def plain(name: str, p: Tensor, q: Tensor, target: int, outside: float) -> float:
    """One row, by the definition, token by token."""
    ps = [math.exp(x) for x in p.tolist()]
    qs = [math.exp(x) for x in q.tolist()]
    ps, qs = [x / sum(ps) for x in ps], [x / sum(qs) for x in qs]
    pairs = list(zip(ps, qs, strict=True))
    accepted = sum(min((1 - outside) * a, b) for a, b in pairs)
    kl = sum(a * math.log(a / b) for a, b in pairs)
    weight = math.exp(-3 * accepted)
    return {
        "ce": 0.0 if target < 0 else -math.log(qs[target]),
        "kl": kl,
        "rkl": sum(b * math.log(b / a) for a, b in pairs),
        "jsd": sum(a * math.log(2 * a / (a + b)) + b * math.log(2 * b / (a + b)) for a, b in pairs) / 2,
        "tv": 1 - accepted,
        "nla": -math.log(accepted),
        "lk": weight * kl + (1 - weight) * (1 - accepted),
    }[name]


def expected(name: str, p: Tensor, q: Tensor, targets: Tensor, outside: Tensor | None) -> Tensor:
    masses = [0.0] * len(p) if outside is None else outside.tolist()
    rows = zip(p.double(), q.double(), targets.tolist(), masses, strict=True)
    return torch.tensor([plain(name, *row) for row in rows], dtype=torch.float64)


def test_all_losses_are_known_by_name() -> None:
    assert list(losses.LOSSES) == ["ce", "kl", "rkl", "jsd", "tv", "nla", "lk"]
    assert all(getattr(losses, name) is loss for name, loss in losses.LOSSES.items())


@pytest.mark.parametrize("mass", MASSES)
@pytest.mark.parametrize("name", losses.LOSSES)
def test_values_are_those_of_the_definition(name: str, mass: float | None) -> None:
    given = example(mass)
    found = losses.LOSSES[name](*given)
    assert found.shape == (ROWS,)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected(name, *given), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("mass", MASSES)
@pytest.mark.parametrize("name", [name for name in losses.LOSSES if name != "lk"])
def test_gradients_are_those_of_finite_differences(name: str, mass: float | None) -> None:
    p, q, targets, outside = example(mass, torch.float64)
    loss = losses.LOSSES[name]
    assert torch.autograd.gradcheck(lambda x: loss(p, x, targets, outside, chunk=3), q.requires_grad_())


@pytest.mark.parametrize("mass", MASSES)
def test_lk_does_not_differentiate_its_own_weight(mass: float | None) -> None:
    p, q, _, outside = example(mass, torch.float64)
    weight = torch.exp(-3 * losses.acceptance(p, q, outside))

    def gradient(values: Tensor) -> Tensor:
        return torch.autograd.grad(values.sum(), q)[0]

    q.requires_grad_()
    parts = weight * losses.kl(p, q) + (1 - weight) * losses.tv(p, q, None, outside)
    torch.testing.assert_close(gradient(losses.lk(p, q, None, outside)), gradient(parts))


def test_the_teacher_gets_no_gradient() -> None:
    p, q, targets, _ = example(None)
    p.requires_grad_()
    q.requires_grad_()
    losses.parse_mix("ce,kl,rkl,jsd,tv,nla,lk")(p, q, targets).sum().backward()
    assert p.grad is None
    assert q.grad is not None


def test_tv_is_half_the_distance_and_counts_the_mass_outside() -> None:
    p, q, _, outside = example(0.3, torch.float64)
    assert outside is not None
    apart = (p.softmax(1) * (1 - outside)[:, None] - q.softmax(1)).abs().sum(1)
    torch.testing.assert_close(losses.tv(p, q, None, outside), (apart + outside) / 2)
    torch.testing.assert_close(losses.acceptance(p, q, outside), 1 - (apart + outside) / 2)


@pytest.mark.parametrize("chunk", [1, 3, 6, 7, 100])
def test_chunks_change_nothing(chunk: int) -> None:
    mix = losses.parse_mix("ce=0.3,kl=1,rkl=0.2,jsd=2,tv=0.9,nla=0.5,lk=0.7")
    p, q, targets, outside = example(0.3)
    results = []
    for size in (chunk, None):
        draft = q.clone().requires_grad_()
        rows = mix(p, draft, targets, outside, chunk=size)
        (rows * torch.arange(1, ROWS + 1)).sum().backward()
        results.append((rows.detach(), draft.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-7, rtol=1e-6)


def test_chunks_keep_nothing_large_for_the_gradient() -> None:
    def kept(chunk: int) -> int:
        seen: list[int] = []
        p, q = torch.randn(64, 500), torch.randn(64, 500, requires_grad=True)
        given = {tensor.untyped_storage().data_ptr() for tensor in (p, q)}

        def note(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in given:
                seen.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            losses.lk(p, q, chunk=chunk)
        return sum(seen)

    assert kept(64) > 64 * 500
    assert kept(8) < 64 * 500 / 10


def test_by_rows_applies_a_head_chunk_by_chunk() -> None:
    head = torch.nn.Linear(5, TOKENS)
    hidden = torch.randn(ROWS, 5, requires_grad=True)
    p, _, targets, _ = example(None)
    mix = losses.parse_mix("kl=0.5,ce=1")
    widest = 0

    def rows(p: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
        nonlocal widest
        widest = max(widest, len(hidden))
        return mix.rows(p, head(hidden), targets, None)

    whole = torch.autograd.grad(mix(p, head(hidden), targets).sum(), [hidden, head.weight])
    parts = torch.autograd.grad(losses.by_rows(rows, p, hidden, targets, chunk=2).sum(), [hidden, head.weight])
    assert widest == 2
    torch.testing.assert_close(parts, whole)
    for tensors, chunk in (((p, hidden[1:], targets), 2), ((p, hidden, targets), 0), ((None,), 2)):
        with pytest.raises(InvalidRequest):
            losses.by_rows(rows, *tensors, chunk=chunk)


def test_a_mix_is_the_weighted_sum() -> None:
    given = example(0.3)
    found = losses.parse_mix(" ce=0.1, tv = 0.9 ")(*given)
    torch.testing.assert_close(found, 0.1 * losses.ce(*given) + 0.9 * losses.tv(*given))
    assert losses.parse_mix("kl").weights == {"kl": 1.0}


@pytest.mark.parametrize("text", ["", "ce=0.1,what=1", "ce=x", "ce=", "ce=-1", "ce=nan", "ce=0", "ce=1,ce=2"])
def test_a_bad_mix_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        losses.parse_mix(text)


def test_what_is_missing_or_misshapen_is_refused() -> None:
    p, q, targets, outside = example(0.3)
    for bad in ((None, q, targets), (p[:, :-1], q), (p, q, targets[1:]), (p, q, targets, targets[1:])):
        with pytest.raises(InvalidRequest):
            losses.kl(*bad)
    with pytest.raises(InvalidRequest):
        losses.ce(p, q, None, outside)
    assert losses.ce(None, q, targets).shape == (ROWS,)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_tokens_ruled_out_and_far_logits_give_finite_gradients(name: str) -> None:
    p, q, targets, _ = example(None)
    p[:, 0] = -math.inf
    q[:, 1] = -math.inf
    p[:, 2], q[:, 2] = -math.inf, -math.inf
    q[3, 4] = 300.0
    targets[:] = 5
    q.requires_grad_()
    found = losses.LOSSES[name](p, q, targets, torch.tensor([0, 1.0, 0, 0, 0, 0, 0.5]))
    found.sum().backward()
    assert found.isfinite().all()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_bfloat16_logits_are_worked_on_in_float32() -> None:
    p, q, targets, _ = example(None)
    p, q = p.bfloat16(), q.bfloat16()
    for loss in losses.LOSSES.values():
        assert torch.equal(loss(p, q, targets), loss(p.float(), q.float(), targets))


def test_acceptance_and_agreement() -> None:
    p, q, _, _ = example(None)
    assert not losses.acceptance(p, q.requires_grad_()).requires_grad
    torch.testing.assert_close(losses.acceptance(p, p), torch.ones(ROWS))
    same = losses.agreement(p, torch.where(torch.arange(ROWS)[:, None] < 3, p, -p))
    assert same.tolist() == [True] * 3 + [False] * 4


def test_confidence() -> None:
    logit = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    chance = torch.tensor([0.9, 0.2], requires_grad=True)
    found = losses.confidence_loss(logit, chance)
    by_hand = [-c * math.log(s) - (1 - c) * math.log(1 - s) for c, s in ((0.9, 0.574442517), (0.2, 0.119202922))]
    torch.testing.assert_close(found, torch.tensor(by_hand))
    found.sum().backward()
    assert chance.grad is None
    torch.testing.assert_close(logit.grad, logit.detach().sigmoid() - chance.detach(), check_dtype=False)


def test_chain_loss_is_minus_the_expected_length() -> None:
    accept = torch.tensor([[0.5, 0.8, 0.1], [1.0, 0.0, 0.7]], dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([0.5 + 0.4 + 0.04, 1.0], dtype=torch.float64)
    torch.testing.assert_close(losses.chain_loss(accept), -lengths)
    assert torch.autograd.gradcheck(losses.chain_loss, accept)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    torch.testing.assert_close(losses.chain_loss(accept, mask).detach(), -torch.tensor([0.55, 0.0]).double())
    with pytest.raises(InvalidRequest):
        losses.chain_loss(accept[0])


def test_weights_of_positions() -> None:
    torch.testing.assert_close(losses.decay(3, 4.0), torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5)]))
    torch.testing.assert_close(losses.exponential(3, 0.8), torch.tensor([1.0, 0.8, 0.64]))
    for bad in (lambda: losses.decay(3, 0), lambda: losses.exponential(3, 0), lambda: losses.dpace(torch.ones(2), 2)):
        with pytest.raises(InvalidRequest):
            bad()


def test_dpace_is_the_gradient_of_the_expected_length_by_log_chances() -> None:
    chances = torch.tensor([[0.9, 0.2, 0.6], [0.5, 0.5, 0.0]])
    logs = (0.5 * chances + 0.5).log().requires_grad_()
    logs.exp().cumprod(1).sum().backward()
    torch.testing.assert_close(losses.dpace(chances), logs.grad)
    torch.testing.assert_close(losses.dpace(torch.tensor([0.5, 0.1]), 0.0), torch.tensor([0.55, 0.05]))
    mask = torch.tensor([[True, False, True], [False, True, True]])
    torch.testing.assert_close(losses.dpace(chances, 0.0, mask=mask)[0], torch.tensor([0.9 + 0.54, 0.0, 0.54]))
    torch.testing.assert_close(losses.dpace(chances, 0.0, mask=mask)[1], torch.tensor([0.0, 0.5, 0.0]))


def test_acceptance_has_a_gradient_only_where_whole_drafts_are_made_of_it() -> None:
    p, q, targets, outside = example(0.3)
    q.requires_grad_()
    for text, wanted in (("kl", False), ("tv", False), ("e2e", True), ("tv=0.5,e2e=2", True)):
        mix = losses.parse_mix(text)
        _, accept = mix.graded(p, q, targets, outside)
        assert accept.requires_grad == wanted
        for chunk in (2, ROWS):
            rows, again = mix.graded(p, q, targets, outside, chunk=chunk)
            torch.testing.assert_close(again, 1 - losses.tv(p, q, outside=outside))
            torch.testing.assert_close(rows, mix(p, q, targets, outside))
    assert not losses.parse_mix("e2e")(p, q, targets, outside).any()
    again.sum().backward()
    slope, q.grad = q.grad, None
    (1 - losses.tv(p, q, outside=outside)).sum().backward()
    torch.testing.assert_close(slope, q.grad)
