"""The same engine on a GPU gives the tokens of the CPU: nothing but the device changes."""

from __future__ import annotations

import pytest
import torch

from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.growers import (
    Beam,
    BestFirst,
    Coupled,
    Hybrid,
    Independent,
    Levels,
    Paths,
    StaticShape,
    WithoutReplacement,
    chain,
)
from draftwood.request import SamplingParams
from draftwood.verifiers import LAWS
from tiny import Ask, Harness, generated, tiny_config, tiny_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"),
]
GROWERS = {
    "chain": chain(3),
    "shape": StaticShape(((0,), (1,), (0, 0))),
    "beam": Beam(nodes=6, width=2, depth=3),
    "best-first": BestFirst(nodes=6, width=2, forwards=3),
    "sampled": Levels((1, 1), Independent()),
    "without-replacement": Levels((2, 2), WithoutReplacement()),
    "hybrid": Levels((2, 2), Hybrid()),
    "paths": Paths(3, 2),
    "delayed": Paths(2, 2, trunk=1),
    "coupled": Levels((2, 1), Coupled()),
}
# The linear programs of `optimal` run on the host, and only there.
LOSSLESS = [name for name, entry in LAWS.items() if entry().lossless and name != "optimal"]
LOSSY = [name for name, entry in LAWS.items() if not entry().lossless]


def asks(temperature: float) -> list[Ask]:
    prompts = [(1, 2, 3, 1, 2), (5,), (7, 7, 8, 7, 7)]
    stack = {"top_k": 9, "top_p": 0.95, "repetition_penalty": 1.1} if temperature else {}
    return [
        Ask(p, SamplingParams(temperature=temperature, seed=i, max_tokens=14, **stack)) for i, p in enumerate(prompts)
    ]


def on_gpu(drafter, law: str, temperature: float, family: str = "llama") -> list[list[int]]:
    target = tiny_runner(tiny_config(family), device=torch.device("cuda"))
    return generated(Harness(target, drafter, LAWS[law]()).run(asks(temperature)))


def on_cpu(temperature: float, family: str = "llama") -> list[list[int]]:
    return generated(Harness(tiny_runner(tiny_config(family)), NoDrafter(), LAWS["match"]()).run(asks(temperature)))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookup_on_a_gpu(family: str, temperature: float) -> None:
    for drafter in (NoDrafter(), NgramDrafter(nodes=6, longest=2, shortest=1, branches=2)):
        assert on_gpu(drafter, "match", temperature, family) == on_cpu(temperature, family)


def drafts_with(grower: str, device: str = "cuda") -> ModelDrafter:
    return ModelDrafter(tiny_runner(noise=0.2, device=torch.device(device)), GROWERS[grower])


def made_for(grower: str, laws: list[str]) -> list[str]:
    return [law for law in laws if LAWS[law]().refuses(GROWERS[grower].law) is None]


@pytest.mark.parametrize("grower", GROWERS)
def test_a_draft_model_on_a_gpu(grower: str) -> None:
    for law in ("match", "coupled"):
        assert on_gpu(drafts_with(grower), law, 1.0) == on_cpu(1.0)
    for law in made_for(grower, LOSSLESS):
        assert on_gpu(drafts_with(grower), law, 0.0) == on_cpu(0.0), law


@pytest.mark.parametrize("grower", GROWERS)
def test_every_law_keeps_on_a_gpu_what_it_keeps_on_the_cpu(grower: str) -> None:
    """Sampled, so the odds are asked: the same draws, the same odds, the same tokens."""
    for law in made_for(grower, LOSSLESS + LOSSY):
        want = Harness(tiny_runner(), drafts_with(grower, "cpu"), LAWS[law]()).run(asks(1.0))
        assert on_gpu(drafts_with(grower), law, 1.0) == generated(want), law
