"""Pages that leave the device and come back, in whole engines; by themselves they are in `test_blocks.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood.growers import Best, Levels, chain
from draftwood.request import SamplingParams
from draftwood.verifiers import LAWS
from tiny import (
    Ask,
    DraftMaker,
    Harness,
    Regime,
    generated,
    no_drafter,
    tiny_runner,
    with_arrivals,
    with_model,
    with_net,
)

V = 13


DRAFTERS: dict[str, DraftMaker] = {
    "none": no_drafter,
    "model-tree": with_model(Levels((3, 2, 1), Best())),
    "model-chain": with_model(chain(4)),
    "eagle3-tree": with_net("eagle3", Levels((3, 2, 1), Best())),
    "dflash-chain": with_net("dflash", chain(4)),
    "medusa-chain": with_net("medusa", chain(3)),
}


def asks_with_shared_beginnings(temperature: float) -> list[Ask]:
    """Two long beginnings in turn: while one is in use, the other has to make room."""
    beginnings = [tuple((i * k) % V for i in range(24)) for k in (3, 5)]
    asks = [
        Ask(
            (*beginnings[i % 2], i),
            SamplingParams(temperature=temperature, seed=i, max_tokens=6 + i % 5),
        )
        for i in range(8)
    ]
    return with_arrivals(asks, every=9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_equal_plain_decoding_with_restored_pages(name: str, temperature: float, dtype: torch.dtype) -> None:
    asks = asks_with_shared_beginnings(temperature)
    alone = [replace(ask, arrives=0) for ask in asks]
    wanted = [
        generated(Harness(tiny_runner(dtype=dtype), no_drafter(dtype), LAWS["match"]()).run([ask]))[0] for ask in alone
    ]
    regime = Regime(max_rows=24, num_pages=12)
    target = tiny_runner(dtype=dtype, num_pages=regime.num_pages)
    target.cache.keep_evicted(16)
    harness = Harness(target, DRAFTERS[name](dtype), LAWS["match"](), regime)
    answers = harness.run(asks)
    assert generated(answers) == wanted
    assert target.cache.tables.pool.num_restored > 4
    roomy = Harness(tiny_runner(dtype=dtype), DRAFTERS[name](dtype), LAWS["match"](), Regime(max_rows=24)).run(asks)
    guesses = [[(answer.drafted, answer.accepted) for answer in each] for each in (answers, roomy)]
    assert guesses[0] == guesses[1], "the drafter has not what it had of restored pages"
