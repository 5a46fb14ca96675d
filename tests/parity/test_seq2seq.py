"""Encoder-decoder models through transformers' own modules: the same logits, the same tokens, sources in our pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.batch import ForwardBatch, Source
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafters.suffix import SuffixDrafter
from draftwood.drafting import Drafter
from draftwood.errors import CheckpointError
from draftwood.growers import Best, Independent, Levels
from draftwood.model import universal_seq2seq, universal_sources
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.runner import ModelRunner
from draftwood.model.universal_rows import as_run
from draftwood.model.universal_seq2seq import Seq2SeqModel
from draftwood.model.universal_sources import Encoder, SourcedStep
from draftwood.protocols import Span
from draftwood.request import SamplingParams
from draftwood.tree import TokenTree
from draftwood.verifiers import LAWS
from parity.test_families import everything_wide
from seq2seq import FAMILIES, START, VOCABULARY, greedy, seq2seq_model, seq2seq_runner, source_of, wanted_logits
from staging import tree_logits
from tiny import Ask, Harness, Regime, generated, tiny_runner, with_arrivals

TEXT = [START, 5, 9, 12, 4, 1, 1, 7, 8, 2, 11, 4, 6, 10, 3, 5, 9]
NEW = 12
Made = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model of transformers and the folder it was saved to, by the name of its family; made once."""
    known: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in known:
            model, folder = seq2seq_model(name), tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            known[name] = model, folder
        return known[name]

    return get


def paged_logits(runner: ModelRunner, source: Source, text: Sequence[int], chunk: int) -> torch.Tensor:
    """All logits of one text behind a source, run in chunks through the pages."""
    tables, tokens, rows = runner.cache.tables, [*source.tokens, *text], []
    tables.open(0, ())
    tables.reserve(0, len(tokens))
    for start in range(0, len(tokens), chunk):
        end = min(len(tokens), start + chunk)
        wanted = torch.arange(max(start, len(source)) - start, max(end, len(source)) - start)
        batch = runner.cache.stage_text([Span(0, tokens, start, end, source)], wanted)
        rows.append(runner.forward(batch).logits)
    tables.close(0)
    return torch.cat(rows)


def bushy_tree(root: int) -> TokenTree:
    return TokenTree.of_points([([root, 3, 5, 3, 7, 1, 4], [-1, 0, 0, 1, 1, 3, 5])])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(made: Made, name: str) -> None:
    """In float32; in float64, whatever the chunks, in sources too; and of every node of a tree."""
    model, folder = made(name)
    source = source_of(name, 1)
    narrow = seq2seq_runner(folder, torch.float32)
    with everything_wide():
        want = wanted_logits(model, source, TEXT)
        assert want.std() > 0.05, "too flat to prove anything"
        other = wanted_logits(model, source_of(name, 2), TEXT)
        assert (want - other).abs().max() > 0.05, "the source does not matter"
        runner = seq2seq_runner(folder)
        assert isinstance(runner.model, Seq2SeqModel)
        for chunk in (64, 3, 1):
            assert (paged_logits(runner, source, TEXT, chunk) - want).abs().max() <= 1e-9
        text = [*source.tokens, *TEXT[:9]]
        runner.cache.tables.open(0, ())
        runner.cache.tables.reserve(0, len(text) + 8)
        tree = bushy_tree(text[-1])
        got = tree_logits(runner, [Span(0, text, 0, len(text), source)], tree)
        for node in range(1, tree.num_nodes):
            path = [int(tree.tokens[n]) for n in tree.paths[node].tolist()[1:] if n >= 0]
            assert (got[node] - wanted_logits(model, source, TEXT[:9] + path)[-1]).abs().max() <= 1e-9
    assert (paged_logits(narrow, source, TEXT, 64) - want).abs().max() <= 1e-4


def asks(name: str, temperature: float) -> list[Ask]:
    """Sources of three lengths, one with a text that the answer begins with."""
    prompts = ((START,), (START, 7, 5), (START,))
    return [
        Ask(prompt, SamplingParams(max_tokens=NEW, temperature=temperature, seed=i + 1), source=source_of(name, i))
        for i, prompt in enumerate(prompts)
    ]


def answers(runner: ModelRunner, drafter: Drafter, wanted: Sequence[Ask], max_rows: int = 512) -> list[list[int]]:
    return generated(Harness(runner, drafter, LAWS["match"](), Regime(max_rows=max_rows)).run(wanted))


def bushy(wanted: Sequence[Ask], truth: Sequence[Sequence[int]]) -> ScriptedDrafter:
    """Paths that hold the truth for a while, behind wrong siblings: keys have to move."""

    def script(tokens: Sequence[int]) -> list[list[int]]:
        paths = []
        for ask, answer in zip(wanted, truth, strict=True):
            before = [*ask.source.tokens, *ask.prompt] if ask.source else []
            done, rng = len(tokens) - len(before), random.Random(len(tokens))
            if done >= 0 and list(tokens) == before + list(answer[:done]):
                right = list(answer[done : done + rng.choice([1, 2, 3, 4])])
                wrong = [[rng.randrange(VOCABULARY), rng.randrange(VOCABULARY)] for _ in range(2)]
                forks = [[*right[:i], rng.randrange(VOCABULARY)] for i in range(1, len(right))]
                paths += [path for path in (*wrong, right, *forks) if path]
        return paths

    return ScriptedDrafter(script, 16)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("mbart", "umt5")])
def test_tokens_are_the_models_own_whatever_drafts_and_chunks(made: Made, name: str) -> None:
    model, folder = made(name)
    runner, cold = seq2seq_runner(folder), asks(name, 0.0)
    with everything_wide():
        want = [greedy(model, ask.source, ask.prompt, NEW) for ask in cold if ask.source]
        assert answers(runner, NoDrafter(), cold) == want
        assert answers(runner, NoDrafter(), with_arrivals(cold, 2), max_rows=7) == want
        assert answers(runner, bushy(cold, want), cold) == want
    warm = asks(name, 0.8)
    sampled = answers(runner, NoDrafter(), warm)
    assert answers(runner, NgramDrafter(nodes=8, longest=3, shortest=1, branches=3), warm) == sampled
    assert answers(runner, SuffixDrafter(nodes=6, shortest=1, least=0.0), with_arrivals(warm, 2), 24) == sampled
    assert answers(runner, bushy(warm, sampled), warm) == sampled


@pytest.mark.parametrize("name", ["t5", "bart", "marian", "pegasus"])
def test_tokens_are_those_of_generate(made: Made, name: str) -> None:
    """Also with a penalty for what was said, which is not what was read."""
    model, folder = made(name)
    for penalty in (1.0, 1.7):
        wanted = [replace(ask, prompt=(START,)) for ask in asks(name, 0.0)]
        params = SamplingParams(max_tokens=NEW, repetition_penalty=penalty)
        with everything_wide(), torch.no_grad():
            want = [
                model.generate(
                    ask.source.inputs[None], attention_mask=torch.ones_like(ask.source.inputs[None]),
                    max_new_tokens=NEW, do_sample=False, num_beams=1, eos_token_id=[12345], repetition_penalty=penalty,
                )[0, 1:].tolist()
                for ask in wanted if ask.source
            ]  # fmt: skip
            got = answers(seq2seq_runner(folder), NgramDrafter(nodes=6), [replace(a, params=params) for a in wanted])
        assert got == want


def test_it_is_preempted_and_shares_what_was_read(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few pages for all; the same source is read once, unless its pages were needed meanwhile."""
    read: list[int] = []
    own = Encoder._read
    monkeypatch.setattr(Encoder, "_read", lambda self, sources: read.append(len(sources)) or own(self, sources))
    for name, pages in (("t5", 14), ("whisper", 22)):
        folder = made(name)[1]
        twice = [*asks(name, 0.8), *(replace(ask, arrives=40) for ask in asks(name, 0.8))]
        runner = seq2seq_runner(folder)
        read.clear()
        want = answers(runner, NoDrafter(), twice)
        assert sum(read) == 3, "once for each source"
        few = seq2seq_runner(folder, num_pages=pages)
        harness = Harness(few, NgramDrafter(nodes=4, longest=3, shortest=1), LAWS["match"]())
        found = harness.run([replace(ask, arrives=ask.arrives // 4) for ask in twice])
        assert generated(found) == want
        assert sum(answer.preemptions for answer in found) > 0
        assert sum(answer.cached_prompt_tokens for answer in found) > 0
        assert want[:3] == want[3:]
        assert harness.engine.scheduler.tables.pool.num_available == pages, "pages leaked"


def test_sources_that_begin_alike_share_nothing(made: Made) -> None:
    """What an encoder makes of a token depends on those behind it."""
    long = source_of("bart", 2)
    other = Source(long.tokens[:8], long.inputs[:8])
    params = SamplingParams(max_tokens=6)
    runner = seq2seq_runner(made("bart")[1])
    wanted = [Ask((START,), params, i * 12, source=s) for i, s in enumerate((long, other, long))]
    found = Harness(runner, NoDrafter(), LAWS["match"]()).run(wanted)
    assert [answer.cached_prompt_tokens for answer in found] == [0, 0, 12]
    model = made("bart")[0]
    assert generated(found) == [greedy(model, ask.source, ask.prompt, 6) for ask in wanted if ask.source]


def test_a_cancelled_request_gives_its_sources_pages_back(made: Made) -> None:
    runner = seq2seq_runner(made("bart")[1], num_pages=40)
    wanted = [replace(ask, cancelled=i + 1) for i, ask in enumerate(asks("bart", 0.0))]
    harness = Harness(runner, NoDrafter(), LAWS["match"]())
    harness.run(wanted)
    assert harness.engine.scheduler.tables.pool.num_available == 40


def test_drafts_come_from_the_source(made: Made) -> None:
    """What the answer begins with stands nowhere but in the source: what follows there is guessed at once."""
    ids = [4, 5, 6, 7, 8, 9]
    ask = Ask((START, 6), SamplingParams(max_tokens=2), source=Source(tuple(ids), torch.tensor(ids)))
    for drafter in (NgramDrafter(nodes=4, shortest=1), SuffixDrafter(nodes=4, least=0.0)):
        answer = Harness(seq2seq_runner(made("bart")[1]), drafter, LAWS["match"]()).run([ask])[0]
        assert answer.drafted > 0


def drafters(made: Made, noise_folder: Path) -> dict[str, Callable[[], Drafter]]:
    def of(folder: Path, *levels: int, law: Any = Best) -> Callable[[], Drafter]:
        return lambda: ModelDrafter(seq2seq_runner(folder, num_pages=50), Levels(levels, law()))

    return {
        "itself": of(made("bart")[1], 1, 1, 1),
        "a likeness": of(noise_folder, 3, 2, 1),
        "a likeness, drawn": of(noise_folder, 2, 2, law=Independent),
        "another family": of(made("t5")[1], 2, 1),
        "a decoder alone": lambda: ModelDrafter(tiny_runner(), Levels((2, 2), Best())),
    }


def test_other_models_draft_for_it(made: Made, tmp_path: Path) -> None:
    """Encoder-decoders read the source with an encoder, decoders as a text; both under the target's slots."""
    seq2seq_model("bart", noise=0.3).save_pretrained(tmp_path)
    want = answers(seq2seq_runner(made("bart")[1]), NoDrafter(), asks("bart", 0.8))
    for name, make in drafters(made, tmp_path).items():
        few = seq2seq_runner(made("bart")[1], num_pages=20)
        twice = [*asks("bart", 0.8), *(replace(ask, arrives=3) for ask in asks("bart", 0.8))]
        found = Harness(few, make(), LAWS["match"](), Regime(max_rows=24)).run(twice)
        assert generated(found) == 2 * want, name
        assert sum(answer.drafted for answer in found) > 0, name
    drafter, target = drafters(made, tmp_path)["itself"](), seq2seq_runner(made("bart")[1])
    found = Harness(target, drafter, LAWS["match"]()).run(asks("bart", 0.0))
    assert sum(answer.accepted for answer in found) >= 0.7 * sum(answer.num_generated for answer in found)
    model = drafter.runner.model  # type: ignore[attr-defined]
    assert model.encoder is target.model.encoder  # type: ignore[attr-defined]
    own, theirs = (next(each.encoder.modules.parameters()) for each in (model, target.model))  # type: ignore[attr-defined]
    assert own.data_ptr() == theirs.data_ptr(), "one copy in memory"


def test_other_encoders_are_not_shared(made: Made, tmp_path: Path) -> None:
    seq2seq_model("bart", noise=0.3).save_pretrained(tmp_path)
    models = [seq2seq_runner(folder).model for folder in (made("bart")[1], tmp_path, made("t5")[1])]
    bart, likeness, t5 = models
    heads = tmp_path / "heads"
    seq2seq_model("bart", encoder_attention_heads=2).save_pretrained(heads)
    for other in (likeness, t5, tiny_runner().model, seq2seq_runner(heads).model):
        assert not bart.share_encoder(other)  # type: ignore[attr-defined]


BROKEN = {
    "source": r"answers would be wrong \(logits differ by",
    "distances": "adds a bias to its scores that was not made for our keys",
    "text": r"answers would be wrong \(logits differ by",
    "padding": r"answers would be wrong \(logits differ by",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_self_check_sees_what_is_wrong(made: Made, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Another's source, biases of rows' numbers, texts that begin within their source, padding that is read."""
    folder = made("t5")[1]
    if broken == "source":
        slots = SourcedStep.all_slots.func  # type: ignore[attr-defined]
        monkeypatch.setattr(SourcedStep, "all_slots", property(lambda step: [slots(step)[0], *slots(step)[:-1]]))
    if broken == "distances":
        monkeypatch.setattr(universal_seq2seq, "with_distances", lambda decoder: None)
    if broken == "text":
        monkeypatch.setattr(SourcedStep, "slots", property(_one_too_early))
    if broken == "padding":
        there = universal_sources._there
        monkeypatch.setattr(universal_sources, "_there", lambda inputs: torch.ones_like(there(inputs)))
    with pytest.raises(CheckpointError, match=BROKEN[broken]):
        seq2seq_runner(folder)


def _one_too_early(step: SourcedStep) -> list[torch.Tensor]:
    slots = zip(step.all_slots, step.source_lengths, strict=True)
    return [own[before - 1 : -1] if before else own for own, before in slots]


def test_an_encoder_gives_no_logits(made: Made) -> None:
    runner, source = seq2seq_runner(made("bart")[1]), source_of("bart", 0)
    tokens = [*source.tokens, START]
    runner.cache.tables.open(0, ())
    runner.cache.tables.reserve(0, len(tokens))
    batch: ForwardBatch = runner.cache.stage_text([Span(0, tokens, 0, len(tokens), source)], torch.arange(2))
    with pytest.raises(ValueError, match="no logits of what it reads"):
        runner.forward(batch)


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    """m2m_100 asks how long the text before is, as one number."""
    settings = FAMILIES["bart"][1]
    FAMILIES["m2m_100"] = ("m2m_100", settings)
    try:
        seq2seq_model("m2m_100").save_pretrained(tmp_path)
    finally:
        del FAMILIES["m2m_100"]
    with pytest.raises(CheckpointError, match=r"m2m_100.*cannot be run.*docs/models.md"):
        seq2seq_runner(tmp_path)
    assert open_checkpoint(tmp_path).config.encoder is not None


def test_sources_are_padded_only_where_that_cannot_matter(tmp_path: Path, made: Made) -> None:
    """An encoder that looks at blocks of long sources reads those of one length together."""
    read: list[int] = []
    FAMILIES["longt5"] = ("longt5", {**FAMILIES["t5"][1], "encoder_attention_type": "local"})
    try:
        seq2seq_model("longt5").save_pretrained(tmp_path)
    finally:
        del FAMILIES["longt5"]
    sources = [Source((1,) * n, torch.arange(i, i + n)) for i, n in enumerate((4, 5, 6, 6, 9))]
    for folder, groups in ((tmp_path, [1, 1, 1, 2]), (made("bart")[1], [1, 4])):
        encoder = seq2seq_runner(folder).model.encoder  # type: ignore[attr-defined]
        alone = [Encoder(encoder.modules, None).states([source])[0] for source in sources]
        read.clear()
        own = encoder._read
        encoder._read = lambda some, own=own: read.append(len(some)) or own(some)
        together = encoder.states(sources)
        assert sorted(read) == groups
        assert all((a - b).abs().max() <= 1e-12 for a, b in zip(alone, together, strict=True))


def test_keys_that_lie_in_a_row_are_read_in_place() -> None:
    assert as_run(torch.tensor([3, 4, 5])) == slice(3, 6)
    for slots in ([3, 5, 4], [3, 5, 6], [4, 3], []):
        assert isinstance(as_run(torch.tensor(slots, dtype=torch.int64)), torch.Tensor)
