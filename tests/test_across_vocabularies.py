"""Draft models of another vocabulary: what is common, what is read, and what is written in the target's tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from draftwood.assembly import way_across
from draftwood.drafters.encoder import Encoder
from draftwood.drafters.intersection import Bridge, IntersectionDrafter
from draftwood.drafters.reencoding import LOOSE, READ, ReencodingDrafter
from draftwood.drafting import Drafter
from draftwood.errors import IncompatibleParts
from draftwood.growers import Beam, Best, Coupled, Independent, Levels, chain
from draftwood.model.tokenizer import Tokenizer
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.verifiers import LAWS
from test_host_drafters import batch_view, host_view
from tiny import Ask, Harness, Regime, generated, no_drafter, tiny_config, tiny_runner
from vocabularies import TEXT, byte_level, with_byte_fallback

KINDS = [(byte_level, with_byte_fallback), (with_byte_fallback, byte_level)]


def model_of(tokenizer: Tokenizer, noise: float = 0.0, num_pages: int = 200, seed: int = 0, **config: int):
    return tiny_runner(tiny_config(vocab_size=tokenizer.vocab_size, **config), seed, noise, num_pages=num_pages)


def between(target: Tokenizer, draft: Tokenizer) -> Bridge:
    return Bridge.between(target, target.vocab_size, draft, draft.vocab_size)


@pytest.mark.parametrize(("target", "draft"), KINDS)
def test_common_tokens_stand_for_the_same(target, draft) -> None:
    theirs, own = target(), draft()
    bridge = between(theirs, own)
    pairs = dict(zip(bridge.common.tolist(), bridge.drafted.tolist(), strict=True))
    end, own_end = min(theirs.eos_ids), min(own.eos_ids)
    assert pairs.pop(end) == own_end
    assert all(theirs.piece(token) == own.piece(other) for token, other in pairs.items())
    assert len(set(pairs.values())) == len(pairs) > 256
    assert 0.5 < bridge.share < 1
    written = {token: bridge.read[token].item() for token in range(theirs.vocab_size) if token not in pairs}
    assert written
    for token, other in written.items():
        if token != end and theirs.piece(token).decode("utf-8", "ignore").encode() == theirs.piece(token) != b"":
            assert theirs.piece(token).endswith(own.piece(other)), "the last that it is written with"


@pytest.mark.parametrize(("target", "draft"), KINDS)
def test_text_from_the_middle_is_written_as_it_would_be_in_its_place(target, draft) -> None:
    rng = random.Random(1)
    for tokenizer in (target(), draft()):
        encoder = Encoder(tokenizer, tokenizer.vocab_size)
        whole = tokenizer.encode(TEXT, special=False)
        for _ in range(50):
            start = rng.randrange(1, len(whole) - 20)
            before, text = tokenizer.decode(whole[:start]), tokenizer.decode(whole[: start + 9])
            if not text.startswith(before) or "�" in text:  # in the middle of a character
                continue
            assert encoder.behind(before, text.removeprefix(before)) == whole[start : start + 9]
        for cut in range(1, 120):
            pieces = encoder.behind(TEXT[:cut], TEXT[cut : cut + 30])
            assert b"".join(map(encoder.bytes_of, pieces)) == TEXT[cut : cut + 30].encode()


def reencoding(target: Tokenizer, draft: Tokenizer, depth: int = 5, least: float = 0.0, **model: int):
    return ReencodingDrafter(model_of(draft, **model), draft, target, target.vocab_size, depth, least)


def written(drafter: ReencodingDrafter, texts: list[list[int]], first: int = 0, room: int = 9) -> list[list[int]]:
    view = replace(host_view(texts, nodes=room), seq_ids=tuple(range(first, first + len(texts))))
    made = drafter.scored(view, drafter.max_nodes)
    assert made.chances is not None
    assert all(own == sorted(own, reverse=True) for own in made.chances)
    return [tokens[1:] for tokens, _ in made.trees]


@pytest.mark.parametrize(("target", "draft"), KINDS)
def test_what_the_model_writes_is_written_in_the_targets_tokens(target, draft) -> None:
    """Whatever was read and drafted before: as if everything was read anew."""
    theirs, own, rng = target(), draft(), random.Random(2)
    drafter, some = reencoding(theirs, own), 0
    texts = [theirs.encode(TEXT, special=False)[:n] for n in (3, 40, 90)]
    for _ in range(25):
        found = written(drafter, texts)
        fresh = written(reencoding(theirs, own), texts)
        assert found == fresh
        for tokens, drafts in zip(texts, found, strict=True):
            some += len(drafts)
            right = rng.random() < 0.5
            tokens += drafts[: rng.randrange(1, 5)] if right and drafts else [rng.randrange(3, theirs.vocab_size)]
    assert some > 100
    assert sum(text.settled > LOOSE for text in drafter._texts.values()) >= 2, "long texts are not encoded whole again"


@pytest.mark.parametrize(("target", "draft"), KINDS)
def test_drafts_are_the_beginning_of_what_the_model_says(target, draft) -> None:
    theirs, own = target(), draft()
    tokens = theirs.encode(TEXT[:90], special=False)
    text = b"".join(map(theirs.piece, tokens)).decode()
    start = own.encode(text)
    runner = model_of(own)
    said = generated(
        Harness(runner, no_drafter(torch.float64), LAWS["match"]()).run(
            [Ask(tuple(start), SamplingParams(max_tokens=5))]
        )
    )
    drafts = written(reencoding(theirs, own), [tokens])[0]
    assert drafts
    whole = b"".join(map(Encoder(own, own.vocab_size).bytes_of, said[0]))
    assert whole.startswith(b"".join(map(Encoder(theirs, theirs.vocab_size).bytes_of, drafts)))


def test_long_prompts_are_read_in_parts_and_everything_is_given_back() -> None:
    theirs, own = byte_level(), with_byte_fallback()
    drafter = reencoding(theirs, own, num_pages=1000, max_position_embeddings=4096)
    long = (theirs.encode(TEXT, special=False) * 9)[: READ + 300]
    assert written(drafter, [long]) == [[]]
    later = next(step for step in range(9) if written(drafter, [long]) != [[]])
    assert later <= 3
    tables = drafter.runner.cache.tables
    assert tables.pool.num_available < 1000
    assert written(drafter, [[1, 2, 3]], first=1, room=0) == [[]]
    drafter.release(0)
    drafter.release(7)
    assert (drafter._texts, tables.pool.num_available) == ({}, 1000)
    tables.check()


def test_without_room_in_the_cache_or_the_model_there_are_no_drafts() -> None:
    theirs, own = byte_level(), with_byte_fallback()
    tokens = theirs.encode(TEXT, special=False)[:80]
    assert written(reencoding(theirs, own, num_pages=3), [tokens]) == [[]]
    assert written(reencoding(theirs, own, max_position_embeddings=16), [tokens]) == [[]]
    assert written(reencoding(theirs, own, least=0.99), [tokens]) == [[]]


def test_a_text_that_ends_inside_a_character_waits() -> None:
    theirs, own = byte_level(), with_byte_fallback()
    (first,) = (token for token in range(theirs.vocab_size) if theirs.piece(token) == "é".encode()[:1])
    drafter = reencoding(theirs, own)
    assert written(drafter, [[*theirs.encode("the cat", special=False), first]]) == [[]]


def test_draws_are_restricted_to_common_tokens_and_renormalised() -> None:
    theirs, own = byte_level(), with_byte_fallback()
    bridge, runner = between(theirs, own), model_of(own)
    target = model_of(theirs)
    drafter = IntersectionDrafter(runner, Levels((2,), Independent()), bridge)
    drafter.attach(target)
    view = replace(batch_view([[5, 9]]), block_table=torch.tensor([[0]]), rows=torch.tensor([0]))
    with torch.inference_mode():
        tree = drafter.propose(view, 2, KeyedRng()).tree
        logits = drafter.begin(view)[0][0, 0]
    assert logits.shape == bridge.common.shape
    q = tree.q[0]
    assert torch.allclose(q[bridge.common].double(), logits.double().softmax(-1))
    assert float(q.sum()) == pytest.approx(1)
    assert int((q > 0).sum()) == len(bridge.common) < len(q)


def make(kind: str, theirs: Tokenizer, own: Tokenizer) -> Drafter:
    runner = model_of(own, num_pages=60)
    if kind == "by text":
        return ReencodingDrafter(runner, own, theirs, theirs.vocab_size, 4, 0.0)
    grower = {"chain": chain(3), "beam": Beam(7, 2, 3), "drawn": Levels((2, 1), Independent())}[kind]
    return IntersectionDrafter(runner, grower, between(theirs, own))


@pytest.mark.parametrize("kind", ["by text", "chain", "beam", "drawn"])
@pytest.mark.parametrize(("target", "draft"), KINDS)
def test_tokens_equal_plain_decoding_with_real_tokenizers(kind: str, target, draft) -> None:
    """In a hard schedule, some requests cancelled; the matrix has the rest."""
    theirs, own = target(), draft()
    tokens = theirs.encode(TEXT, special=False)
    asks = [
        Ask(tuple(tokens[i * 7 : i * 7 + 5 + 9 * i]), SamplingParams(seed=i, temperature=float(i % 2), max_tokens=16))
        for i in range(5)
    ]
    plain = [
        generated(Harness(model_of(theirs), no_drafter(torch.float64), LAWS["match"]()).run([ask]))[0] for ask in asks
    ]
    regime, drafter = Regime(max_rows=24, num_pages=30), make(kind, theirs, own)
    asks[1] = replace(asks[1], cancelled=5)
    harness = Harness(model_of(theirs, num_pages=30), drafter, LAWS["match"](), regime)
    got = generated(harness.run(asks))
    for i, (answer, want) in enumerate(zip(got, plain, strict=True)):
        assert answer == (want[: len(answer)] if i == 1 else want)
    assert harness.engine.scheduler.num_preemptions > 0
    if kind == "by text":
        assert drafter.runner.cache.tables.pool.num_available == 60


def test_the_way_is_chosen_by_what_the_tree_wants() -> None:
    bridge = between(byte_level(), with_byte_fallback())
    bridge = Bridge(bridge.common[:200], bridge.drafted[:200], bridge.read)
    assert not way_across(bridge, chain(4)).by_token
    for grower in (Beam(7, 2, 3), Levels((1, 1), Independent()), Levels((1, 1), Coupled()), Levels((2, 1), Best())):
        assert way_across(bridge, grower).by_token
    same = between(byte_level(), byte_level(340))
    assert same.share > 0.9
    assert way_across(same, chain(4)).by_token
    nothing = torch.empty(0, dtype=torch.int64)
    with pytest.raises(IncompatibleParts, match="no token in common"):
        way_across(Bridge(nothing, nothing, bridge.read), chain(4))
