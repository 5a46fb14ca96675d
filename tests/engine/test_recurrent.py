"""Models with recurrent layers in an engine: shared prefixes, captured steps, refusals, memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import captured
from draftwood.batch import with_text
from draftwood.cache.blocks import PageTables
from draftwood.cache.recurrent import FollowingStates, state_bytes
from draftwood.cli.about import about_table
from draftwood.config import EngineConfig
from draftwood.drafters.combined import CombinedDrafter
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafters.suffix import SuffixDrafter
from draftwood.drafters.view import View, ViewDrafter
from draftwood.drafting import Drafter
from draftwood.engine.llm import LLM
from draftwood.engine.memory import WITHOUT_KEYS, automatic_cache_tokens, plan_memory, with_states_for
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.growers import Best, BestFirst, Levels, chain
from draftwood.model.config import ModelConfig
from draftwood.model.families import FAMILIES as KNOWN
from draftwood.model.mixers import Recurrences
from draftwood.model.runner import ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.protocols import Span
from draftwood.request import SamplingParams
from draftwood.states import KeptPath
from draftwood.tree import TokenTree, Verdict
from draftwood.verifiers import LAWS
from families import RECURRENT
from no_sync import no_looking
from staging import tree_batch
from tiny import Ask, Harness, Regime, TinyCheckpoint, generated, tensor_names, tiny_config, tiny_folder, tiny_runner

PAGE = 4


def config_of(family: str) -> ModelConfig:
    return ModelConfig.from_hf({**RECURRENT[family], "max_position_embeddings": 512})


def prompts(shared: int, own: int, count: int) -> list[tuple[int, ...]]:
    """Texts that begin alike."""
    draw = random.Random(3)
    beginning = [draw.randrange(13) for _ in range(shared)]
    return [(*beginning, i, *(draw.randrange(13) for _ in range(own))) for i in range(count)]


def asking(texts: list[tuple[int, ...]], **more: object) -> list[Ask]:
    params = SamplingParams(temperature=0.8, max_tokens=9)
    return [
        Ask(text, replace(params, seed=i, **more), arrives=30 * i)  # type: ignore[arg-type]
        for i, text in enumerate(texts)
    ]


def alone(config: ModelConfig, asks: list[Ask]) -> list[list[int]]:
    asks = [replace(ask, arrives=0, cancelled=None) for ask in asks]
    return [generated(Harness(tiny_runner(config), NoDrafter(), LAWS["match"]()).run([ask]))[0] for ask in asks]


@pytest.mark.parametrize("family", ["bamba", "lfm2", "qwen3_next", "falcon_mamba"])
def test_a_prefix_is_read_once(family: str) -> None:
    """The second text finds where it parts from the first, and leaves its states there for the third."""
    config, asks = config_of(family), asking([*prompts(22, 9, 4), prompts(22, 9, 1)[0]])
    harness = Harness(tiny_runner(config), NgramDrafter(6, 3, 1, 2), LAWS["match"](), Regime(max_rows=7))
    answers = harness.run(asks)
    assert generated(answers) == alone(config, asks)
    assert [answer.cached_prompt_tokens for answer in answers] == [0, 0, 20, 20, 28]


def test_prefixes_are_shared_with_the_same_salt_only() -> None:
    config, text = config_of("bamba"), prompts(22, 9, 1)[0]
    asks = [*asking([text]), *asking([text], cache_salt="other"), *asking([text])]
    asks = [replace(ask, arrives=30 * i) for i, ask in enumerate(asks)]
    answers = Harness(tiny_runner(config), NoDrafter(), LAWS["match"]()).run(asks)
    assert [answer.cached_prompt_tokens for answer in answers] == [0, 0, 28]
    assert generated(answers) == alone(config, asks)


def test_snapshots_give_way_to_sequences_and_go_with_their_pages() -> None:
    """Few places, few pages, many texts that begin alike: what is found is right, and nothing is lost."""
    config, asks = config_of("bamba"), asking([*prompts(13, 6, 9), *prompts(9, 12, 9)])
    asks = [replace(ask, arrives=3 * i) for i, ask in enumerate(asks)]
    runner = ModelRunner(tiny_runner(config).model, num_pages=24, page_size=PAGE, num_states=5)
    harness = Harness(runner, NgramDrafter(6, 3, 1, 2), LAWS["match"](), Regime(max_running=5, max_rows=24))
    answers = harness.run(asks)
    assert generated(answers) == alone(config, asks)
    assert sum(answer.cached_prompt_tokens > 0 for answer in answers) >= 3
    states = runner.cache.tables.states
    assert states is not None
    assert states.num_snapshots <= states.count


def test_cancelled_requests_leave_their_places_to_others() -> None:
    """While waiting, in the middle of a prompt, in the middle of an answer; the caches are checked after every step."""
    config, asks = config_of("qwen3_next"), asking(prompts(9, 6, 6))
    asks = [
        replace(ask, arrives=i, cancelled=cancelled)
        for i, (ask, cancelled) in enumerate(zip(asks, (None, 1, 4, None, 9, None), strict=True))
    ]
    runner = ModelRunner(tiny_runner(config).model, num_pages=40, page_size=PAGE, num_states=3)
    harness = Harness(runner, NgramDrafter(6, 3, 1, 2), LAWS["match"](), Regime(max_running=3, max_rows=9))
    answers = harness.run(asks)
    for ask, said, wanted in zip(asks, generated(answers), alone(config, asks), strict=True):
        assert said == (wanted if ask.cancelled is None else wanted[: len(said)])
    assert runner.cache.tables.pool.num_available == 40


def test_places_of_states_are_counted() -> None:
    tables = PageTables(8, PAGE, 2)
    tables.open(1, [])
    tables.open(2, [])
    with pytest.raises(ValueError, match="no more than 2"):
        tables.open(3, [])
    tables.check()
    assert 3 not in tables
    tables.close(1)
    assert tables.open(3, []) == 0
    tables.check()
    with pytest.raises(ValueError, match="64 sequences may run, and there are 2 states"):
        Scheduler(tables, SchedulerConfig())


CAPTURED: dict[str, Callable[[], Drafter]] = {
    "branches": lambda: NgramDrafter(6, 3, 1, 3),
    "chain": lambda: ScriptedDrafter(lambda tokens: [[t % 13 for t in tokens[-3:]]], 4, chain=True),
    "model": lambda: ModelDrafter(tiny_runner(config_of("lfm2")), Levels((2, 1), Best())),
    "component": lambda: ViewDrafter(View(changed=Transformer.without_attention), chain(3)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((f, n) for f in ("bamba", "lfm2", "qwen3_5") for n in ("branches", "chain")),
        ("qwen3_5", "model"),
        ("bamba", "component"),
    ],
)
def test_captured_steps_give_the_tokens_of_plain_decoding(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of one size with nodes that are absent, prompts in the steps of others, the host one behind."""
    config = config_of(family)
    asks = [replace(ask, arrives=2 * i) for i, ask in enumerate(asking(prompts(9, 5, 5)))]
    monkeypatch.setattr(captured, "runner", lambda num_pages, page_size: tiny_runner(config, page_size=page_size))
    harness = captured.CapturedHarness(CAPTURED[name](), "match", Regime(max_rows=40, max_running=3))
    assert generated(harness.run(asks)) == alone(config, asks)
    assert any(shape.nodes for shape, _ in harness.runner.ready)
    assert any(shape.text for shape, _ in harness.runner.ready)
    assert not harness.runner._refused


@pytest.mark.parametrize("family", RECURRENT)
def test_nothing_looks_at_values(family: str) -> None:
    """A tree, text beside it, and the path that is kept."""
    config = config_of(family)
    runner = tiny_runner(config)
    spans = [Span(i, [1, 2, 3, 4, 5, 6], 0, 6) for i in range(2)]
    for span in spans:
        runner.cache.tables.open(span.seq_id, ())
        runner.cache.tables.reserve(span.seq_id, 16)
    tree = TokenTree.of_points([([6, 1, 2, 3], [-1, 0, 0, 1])])
    verdict = Verdict(torch.tensor([[0, 1, 3]]), torch.tensor([2]), torch.tensor([0]))
    whole = with_text(tree_batch(runner, spans[:1], tree), runner.cache.stage_text(spans[1:]))
    model, index = runner.model, tree.local[verdict.path]
    rows = torch.randn(len(whole.tokens), config.hidden_size, dtype=torch.float64)
    mixers = [layer.mixer for layer in model.layers.held if layer.mixer is not None]  # type: ignore[attr-defined, union-attr]
    with no_looking():
        recurrences = Recurrences(whole, runner.cache.memory.states)
        for i, mixer in enumerate(mixers):
            recurrences.run(i, mixer, rows)
        assert recurrences.staged is not None
        path = KeptPath(whole.parts[0].block_table, whole.parts[0].tree_base, index, verdict.length)
        runner.cache.states.commit(replace(path, staged=recurrences.staged))


class StateHarness(Harness):
    """Holds every state of a draft model against that of a model that reads the same text anew."""

    checked = 0

    def check(self) -> None:
        super().check()
        drafter, tables = self.engine.drafter, self.engine.target.cache.tables
        if isinstance(drafter, CombinedDrafter):
            drafter = drafter.sources[0]
        assert isinstance(drafter, ModelDrafter)
        following = drafter.runner.cache.layer_states[1]
        assert isinstance(following, FollowingStates)
        for seq in self.engine.scheduler.running[:2]:
            place = tables.state(seq.id)
            assert place is not None
            if held := int(following.held[place]):
                fresh = ModelRunner(drafter.runner.model, 20, PAGE)
                fresh.cache.tables.open(0, ())
                fresh.cache.tables.reserve(0, held)
                fresh.forward(fresh.cache.stage_text([Span(0, seq.tokens, 0, held)]))
                for own, wanted in zip(following.states.stores, fresh.cache.memory.states, strict=True):
                    assert (own.tail[place] - wanted.tail[0]).abs().max() < 1e-9
                    assert own.memory is None or (own.memory[place] - wanted.memory[0]).abs().max() < 1e-9
                self.checked += 1


@pytest.mark.parametrize("way", ["chain", "tree", "combined"])
@pytest.mark.parametrize("family", ["mamba", "bamba", "lfm2", "qwen3_next"])
def test_states_of_a_draft_model_are_never_stale(family: str, way: str) -> None:
    """Behind accepted and rejected nodes, chunks of prompts, preemption, shared prefixes and cancellation."""
    asks = asking(prompts(13, 6, 6), max_tokens=16)
    asks = [replace(ask, arrives=2 * i, cancelled=12 if i == 1 else None) for i, ask in enumerate(asks)]
    grower, target = BestFirst(nodes=9, width=3, forwards=3) if way == "tree" else chain(4), tiny_runner(num_pages=16)
    drafter, regime = ModelDrafter(tiny_runner(config_of(family)), grower), Regime(max_rows=24, num_pages=16)
    if way == "combined":
        drafter = CombinedDrafter([drafter, SuffixDrafter(nodes=6, shortest=1, least=0.0)], least=0.0)
    harness = StateHarness(target, drafter, LAWS["match"](), regime)
    answers = harness.run(asks)
    assert harness.checked > 40
    assert harness.engine.scheduler.num_preemptions > 0
    assert any(answer.cached_prompt_tokens for answer in answers)
    assert sum(answer.accepted for answer in answers) > 0


def test_a_draft_model_that_is_its_target_is_always_right() -> None:
    """Both have recurrent layers, in the same places."""
    config = config_of("bamba")
    asks = [replace(ask, params=replace(ask.params, temperature=0.0)) for ask in asking(prompts(13, 6, 4))]
    answers = Harness(tiny_runner(config), ModelDrafter(tiny_runner(config), chain(4)), LAWS["match"]()).run(asks)
    assert sum(answer.drafted for answer in answers) == sum(answer.accepted for answer in answers) > 20


def test_states_are_planned_and_told(tmp_path: Path) -> None:
    """Of a layer: three inputs of the convolution, and a matrix of each head in float32."""
    config = config_of("bamba")
    size = 3 * (64 + 2 * 2 * 8) * 2 + 4 * 16 * 8 * 4
    assert state_bytes(config.recurrent, torch.bfloat16) == size
    settings = EngineConfig(dtype="bfloat16", device="cpu", cache_tokens=4096, max_running=6, max_rows=64)
    plan = plan_memory(config, None, settings, 1 << 40, 1 << 40)
    assert plan.states == (6 + 4 + 1) * size
    assert [with_states_for(config, None, settings, 4 * size * count).max_running for count in (100, 9, 1)] == [6, 4, 1]
    assert (
        with_states_for(config, None, settings, None) == with_states_for(tiny_config(), None, settings, 0) == settings
    )
    assert plan_memory(config, config, settings, 1 << 40, 1 << 40).states == 2 * plan.states
    assert with_states_for(tiny_config(), config, settings, 36 * size).max_running == 4
    assert automatic_cache_tokens(config_of("mamba2"), None, settings, 1 << 40, 1 << 40) == WITHOUT_KEYS
    runner = ModelRunner(tiny_runner(config, dtype=torch.bfloat16).model, 8, PAGE, 10)
    assert runner.cache.states.num_bytes == 11 * size
    folder = bamba_folder(tmp_path / "model")
    console = Console(file=StringIO(), width=200)
    console.print(about_table(str(folder)))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 with a Mamba-2 mixer, 1 with attention" in said
    assert f"{size / 1024:.1f} KiB a sequence" in said


def bamba_folder(path: Path) -> Path:
    """With a tokenizer, and tensors by Bamba's names."""
    tiny_folder(path)
    raw = json.loads((path / "config.json").read_text())
    raw = {**raw, **RECURRENT["bamba"], "vocab_size": raw["vocab_size"], "max_position_embeddings": 256}
    (path / "config.json").write_text(json.dumps(raw))
    checkpoint = TinyCheckpoint(ModelConfig.from_hf(raw))
    stored = {}
    for name in tensor_names(checkpoint.config):
        place = KNOWN["bamba"].places(name, checkpoint.config)[0]
        stored[place.names[0]] = checkpoint.tensor(name).float()
    save_file(stored, path / "model.safetensors")
    return path


def test_an_llm_serves_one(tmp_path: Path) -> None:
    """By the public interface, several answers of a prompt at once, with drafts and without."""
    folder, said = str(bamba_folder(tmp_path / "model")), []
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, n=3)
    config = EngineConfig(device="cpu", max_running=2, cache_tokens=2048)
    for drafter in ("none", "ngram", f"model:{folder}", "component"):
        with LLM(folder, drafter=drafter, config=config) as llm:
            said.append([answer.text for answer in llm.generate("ab ab ab ab", params).completions])
    assert said[0] == said[1] == said[2] == said[3]
    assert len(set(said[0])) > 1
