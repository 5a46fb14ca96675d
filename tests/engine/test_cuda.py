"""The same engine on a GPU gives the tokens of the CPU: nothing but the device changes."""

from __future__ import annotations

import pytest
import torch

from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.growers import Beam, BestFirst, Hybrid, Independent, Levels, StaticShape, WithoutReplacement, chain
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
}


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


@pytest.mark.parametrize("grower", GROWERS)
def test_a_draft_model_on_a_gpu(grower: str) -> None:
    def drafter() -> ModelDrafter:
        return ModelDrafter(tiny_runner(noise=0.2, device=torch.device("cuda")), GROWERS[grower])

    assert on_gpu(drafter(), "match", 1.0) == on_cpu(1.0)
    assert on_gpu(drafter(), "walk", 0.0) == on_cpu(0.0)
    if GROWERS[grower].law.chain:
        assert on_gpu(drafter(), "block", 0.0) == on_cpu(0.0)
