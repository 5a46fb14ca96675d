"""Two ranks on tiny models: a script that `engine/test_ranks.py` starts twice, with a rank and a folder each.

Every case runs in one process first, then on both ranks; what came of it is written to a file.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from draftwood.batch import Images
from draftwood.drafters.substitute import SubstituteDrafter
from draftwood.engine.controller import FixedBudget
from draftwood.engine.lockstep import Leader, follow
from draftwood.engine.orders import params_of, unpacked
from draftwood.engine.sequence import Sequence as Answer
from draftwood.engine.text import TextStream
from draftwood.growers import Beam, Independent, Levels, WithoutReplacement
from draftwood.model.config import ModelConfig
from draftwood.model.runner import ModelRunner
from draftwood.model.sharding import share_of
from draftwood.model.stages import StageCheckpoint
from draftwood.model.universal_folder import UniversalCheckpoint
from draftwood.model.weights import FORMATS
from draftwood.ranks import ProcessRanks, RankLost, meet
from draftwood.request import FinishReason, SamplingParams, Slo
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS
from families import FAMILIES
from tiny import (
    CPU,
    EASY,
    Ask,
    DraftMaker,
    Harness,
    LetterDecoder,
    NoStutter,
    Regime,
    TinyCheckpoint,
    combining,
    generated,
    ngram,
    no_drafter,
    offering,
    scripted,
    suffix,
    tiny_config,
    with_arrivals,
    with_model,
    with_net,
)

V = 13
LLAMA = tiny_config()
WIDE = tiny_config(hidden_size=64, head_dim=32, intermediate_size=64)
STARVED, SCARCE = Regime(max_rows=24, num_pages=16), Regime(max_rows=24, num_pages=20)


@dataclass(frozen=True)
class Case:
    """A model, who guesses, and what is asked."""

    asks: Sequence[Ask]
    drafter: DraftMaker = no_drafter
    law: str = "match"
    regime: Regime = EASY
    config: ModelConfig = LLAMA
    weights: str = "stored"
    dtype: torch.dtype = torch.float64
    offload: float = 0.0
    nodes: int | None = None  # in a tree; None: as many as the drafter likes
    stages: bool = False  # one after the other, not side by side
    universal: str = ""  # the family of a model that transformers' modules run


def every_pair(tokens: Sequence[int]) -> list[list[int]]:
    """A bushy tree that always holds the next two tokens."""
    return [[a, b] for a in range(V) for b in range(V)]


def requests(temperature: float) -> list[Ask]:
    rng = random.Random(7)
    return [
        Ask(
            tuple(rng.randrange(V) for _ in range(rng.randrange(1, 22))),
            SamplingParams(temperature=temperature, seed=100 + i, max_tokens=rng.randrange(8, 26)),
        )
        for i in range(8)
    ]


def cancelled(asks: Sequence[Ask]) -> list[Ask]:
    steps = (None, 1, None, 3, 0, None, 6, None)
    return [replace(ask, cancelled=step) for ask, step in zip(asks, steps, strict=True)]


def with_wishes(asks: Sequence[Ask]) -> list[Ask]:
    """What has to reach the other rank, too."""
    wishes = [
        {"logit_bias": {3: 1.5}, "stop": ("ab", "k")},
        {"grammar": "13"},
        {"bad_words": ("a", "cd"), "presence_penalty": 0.5},
        {"min_tokens": 4, "stop_token_ids": (1, 2, 3)},
        {"prompt_logprobs": 2, "logprobs": 1, "slo": Slo(50.0, 5.0), "priority": 1},
    ]
    return [replace(ask, params=replace(ask.params, **wishes[i % 5])) for i, ask in enumerate(asks)]


def with_images(asks: Sequence[Ask]) -> list[Ask]:
    """Each prompt's first token is one."""
    embeds = torch.randn(len(asks), 1, LLAMA.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    zero = torch.zeros(1, dtype=torch.int64)
    return [replace(ask, images=Images(zero, embeds[i], None, 0, str(i))) for i, ask in enumerate(asks)]


@cache
def universal_folder(family: str) -> UniversalCheckpoint:
    """A tiny model with weights of its own, as transformers writes it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": V, "max_position_embeddings": 512, "num_local_experts": 4,
             "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    folder = Path(tempfile.mkdtemp()) / family
    torch.manual_seed(0)
    modules = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes)).double()
    with torch.no_grad():
        for part in modules.parameters():
            part.normal_(0, 0.3)
    modules.save_pretrained(folder)
    return UniversalCheckpoint(folder, json.loads((folder / "config.json").read_text()))


def of_family(name: str) -> ModelConfig:
    return ModelConfig.from_hf(FAMILIES[name])


def substitute(dtype: torch.dtype) -> SubstituteDrafter:
    return SubstituteDrafter(TinyCheckpoint(WIDE), FORMATS["int8"], Levels((3, 2, 1), WithoutReplacement()))


BUSHY = scripted(every_pair, 200, False)
EAGLE = with_net("eagle3", Levels((3, 2, 1), WithoutReplacement()))
CASES: dict[str, Case] = {
    "greedy": Case(requests(0.0)),
    "greedy-tree-preempted": Case(requests(0.0), BUSHY, regime=STARVED),
    "sampled-tree": Case(requests(0.8), with_model(Beam(9, 3, 3)), regime=STARVED),
    "drawn-tree": Case(requests(0.8), with_model(Levels((2, 2), Independent())), law="walk"),
    "features": Case(requests(0.8), EAGLE, law="walk", regime=STARVED),
    "staggered-and-cancelled": Case(
        cancelled(with_arrivals(requests(0.8), 2)), ngram(nodes=4, shortest=1), regime=Regime(max_rows=9, num_pages=24)
    ),
    "wishes": Case(with_wishes(requests(0.8)), ngram(nodes=8, shortest=1, branches=3)),
    "images": Case(with_images(requests(0.8)), BUSHY),
    **{f"universal-{name}": Case(requests(0.8)[:4], BUSHY, universal=name) for name in ("olmo", "mixtral")},
    **{
        name: Case(requests(0.8)[:4], BUSHY, config=of_family(name))
        for name in ("gemma2", "gpt_oss", "qwen2_moe", "starcoder2", "gpt_neox", "phi4-mini")
    },
    "int8": Case(requests(0.8)[:4], BUSHY, config=WIDE, weights="int8"),
    "drafts-for-itself": Case(requests(0.8)[:4], substitute, config=WIDE, offload=0.5),
    "layers-away": Case(requests(0.8)[:4], BUSHY, offload=0.5),
    "uneven-vocabulary-float32": Case(requests(0.0), BUSHY, dtype=torch.float32),
}


def in_stages(case: Case) -> Case:
    """The same with the first layers on one rank, and the others on the other."""
    return replace(case, stages=True)


SAME = ("greedy", "sampled-tree", "drawn-tree", "staggered-and-cancelled", "wishes", "images", "gemma2")
MIXED = requests(0.0)[:4] + requests(0.8)[4:]
ASKS, BEGIN = requests(0.8), (3, 1, 4, 1, 5, 9, 2, 6, 5)  # pages that all have
OFFERED = offering(BUSHY, suffix(), with_model(Beam(9, 3, 3)))
CASES |= {
    f"stages-{name}": in_stages(case)
    for name, case in {
        **{name: CASES[name] for name in SAME},
        "of-features": replace(CASES["features"], law="match"),  # others depend on the trees, and these on the batch
        "remembers": Case(requests(0.8)[:4], combining(BUSHY, suffix())),
        "several-drafters": Case(with_arrivals([replace(ask, prompt=BEGIN + ask.prompt) for ask in ASKS], 3), OFFERED),
        "ahead": Case(with_arrivals(requests(0.8), 14), BUSHY, nodes=91),
        "ahead-by-model": Case(
            cancelled(with_arrivals(MIXED, 12)), with_model(Beam(14, 3, 6), 0.0), regime=SCARCE, nodes=7
        ),
        "ahead-greedy": Case(with_arrivals(requests(0.0), 14), ngram(nodes=8, shortest=1, branches=2), nodes=4),
        "ahead-walk": Case(
            with_arrivals(requests(0.8)[:4], 14), with_model(Levels((2, 2), Independent())), law="walk", nodes=2
        ),
        "int8-float32": Case(requests(0.0)[:4], BUSHY, config=WIDE, weights="int8", dtype=torch.float32),
    }.items()
}


def harness(case: Case, ranks: ProcessRanks | None, rng: KeyedRng | None = None) -> Harness:
    whole, regime = universal_folder(case.universal) if case.universal else TinyCheckpoint(case.config), case.regime
    checkpoint = whole
    if ranks is not None:
        share = StageCheckpoint(whole, ranks) if case.stages else share_of(whole, ranks, FORMATS[case.weights])
        checkpoint = share
    pages = regime.num_pages, regime.page_size
    away = case.offload if ranks is not None else 0.0
    target = ModelRunner.load(checkpoint, case.dtype, CPU, *pages, FORMATS[case.weights], offload=away)
    made = Harness(target, case.drafter(case.dtype), LAWS[case.law](), regime, rng)
    if case.nodes is not None:
        made.engine.controller = FixedBudget(case.nodes)
    return made


def unpack(plain: dict) -> Answer:
    params = params_of(plain)
    constraint = NoStutter(int(params.grammar)) if params.grammar else None
    return unpacked(plain, params, TextStream(LetterDecoder(), params.stop), constraint)


class Led(Harness):
    """The same schedule, driven through rank 0's driver."""

    in_flight = 0  # the most steps that went on behind another one

    def drive(self, driver: Leader, asks: Sequence[Ask]) -> list[Answer]:
        answers = [self.answer(i, ask) for i, ask in enumerate(asks)]
        for step in range(5000):
            for ask, answer in zip(asks, answers, strict=True):
                if ask.arrives == step:
                    driver.add([answer])
                if ask.cancelled == step:
                    self.events += driver.abort(answer.request_id, FinishReason.CANCELLED)
            if self.engine.scheduler.has_work:
                self.events += driver.step()
                self.in_flight = max(self.in_flight, len(self.engine._flights))
            self.check()
            if not self.engine.scheduler.has_work and all(ask.arrives <= step for ask in asks):
                break
        return answers


def on_ranks(case: Case, ranks: ProcessRanks) -> tuple[list[list[int]] | None, Harness]:
    made = harness(case, ranks)
    if ranks.rank:
        follow(made.engine, ranks, unpack)
        return None, made
    made.__class__ = Led
    leader = Leader(made.engine, ranks)
    answers = made.drive(leader, case.asks)  # type: ignore[attr-defined]
    leader.close()
    return generated(answers), made


@cache
def alone_on(name: str) -> tuple[list[list[int]], Harness]:
    """What one process generates."""
    case = CASES[name if name in CASES else f"stages-{name}"]
    alone = harness(case, None)
    return generated(alone.run(case.asks)), alone


def compare(name: str, ranks: ProcessRanks) -> dict[str, object]:
    """Tokens of one process and of two, and how hard it was."""
    case = CASES[name]
    got, led = on_ranks(case, ranks)
    if got is None:
        return {}
    want, alone = alone_on(name.removeprefix("stages-"))
    texts = [(led.text(i), alone.text(i)) for i in range(len(case.asks))]
    for i, ask in enumerate(case.asks):
        if case.stages and ask.cancelled is not None:  # it has come further by then, or not as far
            got[i], want[i] = got[i][: len(want[i])], want[i][: len(got[i])]
            texts[i] = texts[i][0][: len(texts[i][1])], texts[i][1][: len(texts[i][0])]
    return {
        "want": want,
        "got": got,
        "text": [a == b for a, b in texts],
        "in_flight": led.in_flight,  # type: ignore[attr-defined]
        "preemptions": led.engine.scheduler.num_preemptions,
        "pages": led.engine.scheduler.tables.pool.num_available,
        "bytes": [h.engine.target.model.num_bytes for h in (alone, led)],
        "cache": [h.engine.target.cache.num_bytes for h in (alone, led)],
    }


class OtherNoise(KeyedRng):
    """Of a rank that has not the state it should have."""

    def pick(self, weights: Tensor, keys: Tensor) -> Tensor:
        return super().pick(weights, keys + 1)

    def race(self, weights: Tensor, keys: Tensor, winners: int = 1) -> Tensor:
        return super().race(weights, keys + 1, winners)


def diverge(ranks: ProcessRanks) -> dict[str, object]:
    """One rank draws other tokens than the other."""
    made = harness(Case(requests(1.0)), ranks, OtherNoise() if ranks.rank else None)
    try:
        if ranks.rank:
            follow(made.engine, ranks, unpack)
        made.__class__ = Led
        made.drive(Leader(made.engine, ranks), requests(1.0))  # type: ignore[attr-defined]
    except RankLost as error:
        return {"error": str(error), "steps": len({event.stats.steps for event in made.events})}
    return {}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = meet(dist.FileStore(str(folder / "store"), 2), rank, 2, CPU)
    found = {name: compare(name, ranks) for name in CASES}
    found["diverged"] = diverge(ranks)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
