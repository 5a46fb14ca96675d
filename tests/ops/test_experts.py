"""Mixtures of experts on a GPU: what the reference computes, the same bits among any rows, and nothing looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftwood.model.experts import Experts, ExpertWeights, SharedExpert
from draftwood.model.spec import CLAMPED, ExpertsSpec, MlpSpec
from draftwood.model.weights import Storage, as_numbers, quantise_float8, store_as
from draftwood.ops.cuda.experts import CudaExperts, CudaMlp, run_grouped
from draftwood.ops.cuda.linear import CudaLinear, Stream, pack
from draftwood.ops.cuda.products import Norm
from draftwood.ops.linear import make_linear
from no_sync import no_looking

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDE, INNER, COUNT = 64, 32, 5
STORAGES = {"dense": None, "int8": Storage.INT8, "int4": Storage.INT4, "float8": Storage.FLOAT8}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rounded(weight: Tensor, kind: str):
    storage = STORAGES[kind]
    if storage is None:
        return weight
    return quantise_float8(weight) if storage == Storage.FLOAT8 else store_as(storage, weight)


def both(
    kind: str = "dense", activation: str = "silu", shared: bool = False, strict: bool = False
) -> tuple[CudaExperts, Experts]:
    """A mixture as the kernels have it, and as the reference has it, from the numbers that its weights stand for."""
    spec = ExpertsSpec(COUNT, 2, MlpSpec(INNER, activation, bias=True), router_bias=True)
    if shared:
        spec = replace(spec, shared=MlpSpec(INNER, "silu"), normalised=False)
    router, bias = random(COUNT, WIDE, seed=1) * WIDE**-0.5, random(COUNT, seed=2)
    ups = [rounded(random(2 * INNER, WIDE, seed=10 + i) * WIDE**-0.5, kind) for i in range(COUNT)]
    downs = [rounded(random(WIDE, INNER, seed=20 + i) * INNER**-0.5, kind) for i in range(COUNT)]
    up_bias, down_bias = random(COUNT, 2 * INNER, seed=3), random(COUNT, WIDE, seed=4)

    def linear(weight: Tensor, bias: Tensor | None = None) -> CudaLinear:
        return CudaLinear(pack([weight], weight.shape[1]), bias, strict)

    beside, gate = [random(2 * INNER, WIDE, seed=5) / 8, random(WIDE, INNER, seed=6) / 8], random(1, WIDE, seed=7)
    ours = CudaExperts(
        spec, linear(router, bias), CudaLinear(pack(ups, WIDE), up_bias.flatten(), strict),
        CudaLinear(pack(downs, INNER), down_bias.flatten(), strict),
        CudaMlp(linear(beside[0]), linear(beside[1]), "silu") if shared else None, linear(gate) if shared else None,
    )  # fmt: skip

    def stacked(parts: list) -> Tensor:
        return torch.stack([as_numbers(part).double().t() for part in parts])

    weights = ExpertWeights(stacked(ups), stacked(downs), up_bias.double(), down_bias.double())
    other = SharedExpert(*(make_linear(w.double()) for w in (*beside, gate)), "silu") if shared else None
    return ours, Experts(spec, make_linear(router.double(), bias.double()), weights, other)


@pytest.mark.parametrize(
    ("kind", "activation", "shared"),
    [*((kind, "silu", False) for kind in STORAGES), ("dense", CLAMPED, False), ("dense", "silu", True)],
)
def test_it_is_what_the_reference_computes(kind: str, activation: str, shared: bool) -> None:
    """So few rows that some experts have none."""
    ours, reference = both(kind, activation, shared)
    for n in (1, 4):
        x = random(n, WIDE, seed=n)
        want = reference(x.double())
        assert (ours(Stream(x)).double() - want).abs().max() <= 2e-5 * max(1.0, float(want.abs().max()))
    norm = Norm(random(WIDE, seed=9), 1e-5)
    stream = ours.add_to(Stream(x), norm)
    assert (stream.hidden.double() - (x + want)).abs().max() <= 1e-4
    assert stream.normed is not None
    assert (stream.normed - replace(stream, normed=None).read()).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["dense", "int4"])
def test_rows_are_the_same_bits_in_any_company(kind: str) -> None:
    ours, _ = both(kind, strict=True)
    x = random(12, WIDE, seed=8).half()
    ours = replace(ours, router=CudaLinear(pack([random(COUNT, WIDE, seed=1).half()], WIDE), strict=True))
    if kind == "dense":
        halves = [
            replace(lin, weight=replace(lin.weight, codes=lin.weight.codes.half())) for lin in (ours.gate_up, ours.down)
        ]
        ours = replace(ours, gate_up=halves[0], down=halves[1])
    whole = ours(Stream(x))
    for rows in (slice(0, 1), slice(3, 12)):
        assert torch.equal(ours(Stream(x[rows].contiguous())), whole[rows])


def test_only_experts_that_rows_have_chosen_are_read() -> None:
    """And of those only once, however many rows they have; nothing waits for the device to find that out."""
    ours, reference = both()
    bias = torch.tensor([90.0, 0, 0, 80, 0], device=DEVICE)
    ours = replace(ours, router=CudaLinear(ours.router.weight, bias))
    reference = replace(reference, router=make_linear(ours.router.weight.codes.double(), bias.double()))
    x = random(18, WIDE, seed=5)
    with no_looking():
        routes, made = ours.routes(x), ours(Stream(x))
    assert routes.chosen.tolist() == [[0, 3]] * 18
    assert sorted(routes.tiles[: int(routes.num_tiles)].tolist()) == [[0, 0, 16], [0, 16, 2], [3, 18, 16], [3, 34, 2]]
    want = reference(x.double())
    assert (made.double() - want).abs().max() <= 2e-5 * max(1.0, float(want.abs().max()))
    broken = ours.gate_up.weight.codes.clone().view(COUNT, 2 * INNER, WIDE)
    broken[[1, 2, 4]] = float("nan")
    poisoned = replace(ours, gate_up=CudaLinear(pack([broken.flatten(0, 1)], WIDE), ours.gate_up.bias))
    assert torch.equal(poisoned(Stream(x)), made)


def test_a_narrowed_router_chooses_among_those_allowed() -> None:
    ours, _ = both()
    x, allowed = random(3, WIDE, seed=5), torch.tensor([0, 1, 0, 1, 1], dtype=torch.uint8, device=DEVICE)
    chosen = replace(ours, allowed=allowed).routes(x).chosen
    logits = ours.router(Stream(x), torch.float32).masked_fill(allowed == 0, -torch.inf)
    assert torch.equal(chosen.long(), logits.topk(2).indices)


def test_matrices_of_others_are_run_as_they_lie() -> None:
    """With choices of another router, and what stands between the products in torch."""
    ours, _ = both()
    x, weights = random(5, WIDE, seed=5), ours.gate_up.weight.codes.view(COUNT, 2 * INNER, WIDE)
    downs = ours.down.weight.codes.view(COUNT, WIDE, INNER)
    shares, chosen = torch.softmax(ours.router(Stream(x), torch.float32), -1).topk(3)

    def gate(wide: Tensor) -> Tensor:
        return torch.nn.functional.silu(wide[:, :INNER]) * wide[:, INNER:]

    with no_looking():
        got = run_grouped(x, chosen, shares, weights, downs, gate)
    for row in range(5):
        want = sum(
            share * (gate((weights[e] @ x[row])[None])[0] @ downs[e].t())
            for e, share in zip(chosen[row].tolist(), shares[row], strict=True)
        )
        assert (got[row] - want).abs().max() <= 1e-5
