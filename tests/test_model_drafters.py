"""Drafters that are language models: at every node they say what the model says of the text and the node's path alone,
step after step, whatever was accepted before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import captured
from captured import GPU, CapturedHarness
from draftwood.cache.batch_state import BatchState, StepInputs, input_numbers
from draftwood.cache.row_settings import RowSettings
from draftwood.drafters.kangaroo import ShallowDrafter
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.pard import ParallelDrafter
from draftwood.drafting import Front, Proposal
from draftwood.growers import (
    Beam,
    Best,
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
from draftwood.model.runner import ModelRunner
from draftwood.protocols import BatchView, Budget, Load, Span, StepMode, StepReport
from draftwood.request import SamplingParams
from draftwood.rng import KeyedRng
from draftwood.tree import TokenTree, Verdict
from draftwood.verifiers import Match
from no_sync import no_looking
from tiny import (
    CPU,
    Ask,
    Harness,
    Regime,
    generated,
    tiny_config,
    tiny_runner,
    with_masks,
    with_net,
    with_student,
)

GROWERS = {
    "chain": chain(4),
    "levels": Levels((2, 2, 1), Best()),
    "sampled": Levels((2, 2), Independent()),
    "without-replacement": Levels((2, 2), WithoutReplacement()),
    "hybrid": Levels((2, 2), Hybrid()),
    "coupled": Levels((2, 1, 1), Coupled()),
    "static": StaticShape(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    "paths": Paths(2, 3),
    "trunk": Paths(2, 2, trunk=1),
    "beam": Beam(6, 2, 3),
    "best-first": BestFirst(6, 2, 3),
}
TEXTS = ([3, 5, 1, 12, 7, 7, 2, 0, 9], [4], [11, 6], [8, 2, 2, 10, 1])


@dataclass
class Heard:
    """Logits that a drafter gave at nodes, and what stands before them."""

    front: Front | None  # None: the roots
    logits: Tensor  # [B, k, R]

    def path(self, b: int, k: int) -> list[int]:
        """Draft tokens up to the k-th node of a tree."""
        return [] if self.front is None else self.front.path[b, k, : self.front.depth[b, k]].tolist()


class Listening:
    """A grower that writes down what it hears."""

    def __init__(self, grower: Any) -> None:
        self.grower = grower
        self.heard: list[Heard] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grower, name)

    def grow(self, model: Any, view: BatchView, nodes: int, rng: KeyedRng) -> Proposal:
        self.heard.clear()
        return self.grower.grow(_Ear(model, self.heard), view, nodes, rng)


class _Ear:
    def __init__(self, model: Any, heard: list[Heard]) -> None:
        self.model, self.heard, self.vocabulary = model, heard, model.vocabulary

    def begin(self, view: BatchView) -> Any:
        logits, state = self.model.begin(view)
        self.heard.append(Heard(None, logits))
        return logits, state

    def extend(self, view: BatchView, front: Front, state: Any) -> Any:
        logits, state = self.model.extend(view, front, state)
        self.heard.append(Heard(front, logits))
        return logits, state


def real_methods() -> Any:
    """Puts a tensor's methods that look at values in their places again."""
    names = ("tolist", "numpy", "__array__")
    return partial(patch.multiple, Tensor, **{name: getattr(Tensor, name) for name in names})


class Decoding:
    """Sequences that a drafter drafts for; what is accepted, the test decides."""

    def __init__(self, drafter: Any, texts: Sequence[Sequence[int]], look: bool, target: ModelRunner | None = None):
        self.drafter, self.look = drafter, look
        self.target = tiny_runner() if target is None else target
        self.texts = [list(text) for text in texts]
        drafter.attach(self.target)
        drafter.grower = self.grower = Listening(drafter.grower)
        cache = self.target.cache
        self.state = BatchState(len(texts), 300, cache.page_size, cache.scratch_page, CPU)
        for i, text in enumerate(self.texts):
            cache.tables.open(i, ())
            settings = RowSettings(SamplingParams(temperature=1.0), 40 + i, len(text), 280, 50)
            self.state.add(i, text, settings)
        self.catch_up([0] * len(texts))

    def catch_up(self, read: Sequence[int]) -> None:
        """The drafter runs what it has not read."""
        spans = []
        for i, (start, text) in enumerate(zip(read, self.texts, strict=True)):
            assert self.target.cache.tables.reserve(i, len(text) + 40)
            spans += [Span(i, text, start, len(text) - 1)] if start < len(text) - 1 else []
        if spans:
            batch = self.target.cache.stage_text(spans)
            with self.blind():
                self.drafter.ingest(batch, None)

    @contextmanager
    def blind(self) -> Iterator[None]:
        """As if captured, where values must not be looked at; all but the forwards: their kernels for a CPU do."""
        runner, forward, kernels = self.drafter.runner, self.drafter.runner.forward, real_methods()

        def seeing(*args: Any) -> Any:
            with _disable_current_modes(), kernels():
                return forward(*args)

        runner.forward = seeing
        try:
            with nullcontext() if self.look else no_looking():
                yield
        finally:
            del runner.forward

    def view(self, gained: int | None = None, rooms: Sequence[int] | None = None) -> BatchView:
        count = len(self.texts)
        tables = self.target.cache.tables
        for i, text in enumerate(self.texts):
            assert tables.reserve(i, len(text) + 40)
        self.state.update_block_tables({i: tables.pages(i) for i in range(count)})
        rows = self.state.rows(range(count))
        sequences = [(row, 99 if rooms is None else rooms[i], 0, 0) for i, row in enumerate(rows)]
        inputs = StepInputs.over(torch.tensor(input_numbers(sequences, [], [], (count, 0, 0), count)), count, 0)
        view = self.state.view(inputs, StepMode(limited=rooms is not None), self.state.num_pages)
        return replace(view, gained=gained, may_look=self.look)

    def propose(self, view: BatchView, nodes: int) -> Proposal:
        if not self.look:
            self.drafter.propose(view, nodes, KeyedRng())  # as before a capture: makes what is made once
        with self.blind():
            proposal = self.drafter.propose(view, nodes, KeyedRng())
        return proposal.packed() if self.look else proposal

    def accept(self, view: BatchView, proposal: Proposal, nodes: Sequence[int], bonus: Sequence[int]) -> int:
        """Keep the path to one node of each tree; returns the most that a sequence gained."""
        tree, last = proposal.tree, torch.tensor(nodes)
        verdict = Verdict(tree.paths[last], tree.depth[last], torch.tensor(bonus))
        with self.blind():
            self.drafter.commit(view, proposal, verdict, {})
        self.state.advance(view, tree, verdict, torch.ones(len(nodes), dtype=torch.bool))
        for text, path, token in zip(self.texts, verdict.path.tolist(), bonus, strict=True):
            text += [int(tree.tokens[node]) for node in path[1:] if node >= 0] + [token]
        return int(verdict.length.max()) + 1

    def check(self, atol: float = 1e-9) -> int:
        """Everything that the grower heard is what the model says of the text alone. Returns how many nodes."""
        fresh, count = Fresh(self.drafter.runner), 0
        for heard in self.grower.heard:
            for b, text in enumerate(self.texts):
                for k in range(heard.logits.shape[1]):
                    path = heard.path(b, k)
                    expected = fresh.logits([*text, *path])
                    assert torch.allclose(heard.logits[b, k], expected, rtol=0, atol=atol), (b, path)
                    count += 1
        return count


class Fresh:
    """A model with an empty cache."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = ModelRunner(runner.model, 80, 4)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        tables = self.runner.cache.tables
        tables.open(0, ())
        assert tables.reserve(0, len(tokens))
        last = torch.tensor([len(tokens) - 1])
        (logits,) = self.runner.forward(self.runner.cache.stage_text([Span(0, tokens, 0, len(tokens))], last)).logits
        tables.close(0)
        return logits


def present(tree: TokenTree, b: int) -> list[int]:
    first, end = tree.offsets[b : b + 2].tolist()
    return [node for node in range(first, end) if tree.tokens[node] >= 0]


def decode(decoding: Decoding, steps: int, known: bool, limited: bool, seed: int, atol: float = 1e-9) -> None:
    """Steps of any size in which any nodes are accepted, the deepest ones often."""
    chance, gained = random.Random(seed), 1
    sizes = [size for size in decoding.drafter.sizes if size]
    for _ in range(steps):
        rooms = [chance.choice([0, 1, 3, 99]) for _ in decoding.texts] if limited else None
        view = decoding.view(gained if known else None, rooms)
        proposal = decoding.propose(view, chance.choice(sizes[-3:]))
        proposal.tree.packed()[0].validate()
        assert decoding.check(atol) >= len(decoding.texts)
        trees = [present(proposal.tree, b) for b in range(len(decoding.texts))]
        if rooms is not None:
            assert all(len(own) - 1 <= room for own, room in zip(trees, rooms, strict=True))
        accepted = [own[-1] if chance.random() < 0.5 else chance.choice(own) for own in trees]
        gained = decoding.accept(view, proposal, accepted, [chance.randrange(13) for _ in trees])


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("name", GROWERS)
def test_a_second_model_says_what_it_says_of_the_text_alone(name: str, look: bool, limited: bool) -> None:
    drafter = ModelDrafter(tiny_runner(noise=0.3), GROWERS[name])
    decode(Decoding(drafter, TEXTS, look), 7, look, limited, seed=len(name))


@pytest.mark.parametrize("name", ["chain", "levels", "beam"])
def test_so_it_does_on_our_own_kernels(name: str) -> None:
    drafter = ModelDrafter(tiny_runner(noise=0.3, dtype=torch.float32), GROWERS[name])
    decode(Decoding(drafter, TEXTS, True), 5, True, False, seed=1, atol=1e-4)


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("name", ["chain", "levels", "beam", "paths"])
def test_first_layers_of_the_target_say_what_they_say_of_the_text_alone(name: str, look: bool) -> None:
    drafter = with_net("kangaroo", GROWERS[name])(torch.float64)
    assert isinstance(drafter, ShallowDrafter)
    decode(Decoding(drafter, TEXTS, look), 6, look, False, seed=2)


@pytest.mark.parametrize("look", [True, False])
def test_a_student_says_what_it_says_of_the_text_alone(look: bool) -> None:
    decode(Decoding(with_student(chain(4))(torch.float64), TEXTS, look), 6, look, False, seed=3)


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("name", GROWERS)
def test_what_is_said_behind_masks_is_what_the_model_says_there(name: str, look: bool) -> None:
    """Whatever was accepted before: it has not run that, and runs it when the next step begins."""
    drafter = ParallelDrafter(tiny_runner(noise=0.3), GROWERS[name], mask=5, guesses=3)
    decoding, chance, gained = Decoding(drafter, TEXTS, look), random.Random(4), 1
    for _ in range(6):
        nodes = chance.choice([size for size in drafter.sizes if size][-3:])
        view = decoding.view(gained if look else None)
        proposal = decoding.propose(view, nodes)
        assert proposal.tree.max_depth <= 3, "no deeper than there are masks"
        fresh = Fresh(drafter.runner)
        for heard in decoding.grower.heard:
            for b, text in enumerate(decoding.texts):
                for k in range(heard.logits.shape[1]):
                    expected = fresh.logits([*text, *[5] * len(heard.path(b, k))])
                    assert torch.allclose(heard.logits[b, k], expected, rtol=0, atol=1e-9)
        trees = [present(proposal.tree, b) for b in range(len(TEXTS))]
        accepted = [own[-1] if chance.random() < 0.5 else chance.choice(own) for own in trees]
        gained = decoding.accept(view, proposal, accepted, [chance.randrange(13) for _ in trees])


@pytest.mark.parametrize("masks", [False, True])
def test_no_more_rows_are_run_than_needed(masks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = with_masks(chain(6))(torch.float64) if masks else ModelDrafter(tiny_runner(), chain(3))
    decoding, rows = Decoding(drafter, [[1, 2, 3]], True), []
    forward = drafter.runner.forward  # type: ignore[attr-defined]
    monkeypatch.setattr(drafter.runner, "forward", lambda b: (rows.append(len(b.tokens)), forward(b))[1])  # type: ignore[attr-defined]
    for gained in (1, 3, None):
        rows.clear()
        drafter.propose(decoding.view(gained), 3, KeyedRng())
        known = {1: [1, 1, 1], 3: [2, 1, 1], None: [2, 1, 1]}
        behind_masks = {1: [1 + 2], 3: [3 + 2], None: [5 + 2]}  # four masks in all, of which three tokens need two
        assert rows == (behind_masks if masks else known)[gained]


@pytest.mark.parametrize(
    "make", [lambda: ModelDrafter(tiny_runner(noise=0.3), chain(3)), lambda: with_masks(chain(3))(torch.float64)]
)
def test_it_catches_up_after_steps_without_drafts(make: Any) -> None:
    """Tokens that other drafters, or none, were there for are run before it drafts again."""
    decoding = Decoding(make(), TEXTS, True)
    for _ in range(2):
        read = [len(text) for text in decoding.texts]
        for number in range(9):
            tree = TokenTree.roots(decoding.view().roots)
            bare = Verdict.of_roots(tree, torch.tensor([number % 13] * len(TEXTS)))
            decoding.state.advance(decoding.view(), tree, bare, torch.ones(len(TEXTS), dtype=torch.bool))
            for text in decoding.texts:
                text.append(number % 13)
        decoding.catch_up([start - 1 for start in read])
        view = decoding.view(1)
        proposal = decoding.propose(view, 3)
        if isinstance(decoding.drafter, ParallelDrafter):
            decoding.grower.heard[1:] = []  # the others are behind masks
        assert decoding.check() >= len(TEXTS)
        decoding.accept(view, proposal, [present(proposal.tree, b)[-1] for b in range(len(TEXTS))], [7] * len(TEXTS))
        decoding.propose(decoding.view(4), 3)  # runs what was accepted


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("name", ["chain", "levels", "paths", "beam"])
def test_beyond_its_positions_a_shorter_model_has_nothing_to_say(name: str, look: bool) -> None:
    """Every draft whose parent has a position is there, and none besides; sequences that are shorter do not notice."""
    texts = [[1, 2, 3], list(range(10)), [*range(10), 3], [*range(12), 0, 1, 2]]
    drafter = ModelDrafter(tiny_runner(tiny_config(max_position_embeddings=12), noise=0.3), GROWERS[name])
    plain = ModelDrafter(tiny_runner(noise=0.3), GROWERS[name])
    short, whole = Decoding(drafter, texts, look), Decoding(plain, texts, look)
    nodes, reach = drafter.max_nodes, torch.tensor([max(0, 12 + 1 - len(text)) for text in texts])
    tree = short.propose(short.view(), nodes).tree
    limited = replace(whole.view(), max_depth=reach, max_nodes=torch.full_like(reach, nodes))
    every = whole.propose(limited, nodes).tree

    def paths(found: TokenTree, b: int) -> list[tuple[int, ...]]:
        return [
            tuple(found.tokens[[n for n in found.paths[node].tolist() if n >= 0]].tolist())
            for node in present(found, b)
        ]

    assert [paths(tree, b) for b in range(4)] == [paths(every, b) for b in range(4)]
    assert [len(present(tree, b)) > 1 for b in range(4)] == [True, True, True, False]
    bare = Decoding(ModelDrafter(tiny_runner(tiny_config(max_position_embeddings=4)), GROWERS[name]), texts[1:], True)
    assert bare.propose(bare.view(), nodes).tree.num_drafted == 0
    assert bare.grower.heard == [], "where nothing can come of it, nothing is run"


@pytest.mark.parametrize(("pages", "size"), [(200, 4), (7, 4), (200, 3), (500, 8)])
def test_its_cache_lies_under_the_pages_of_any_target(pages: int, size: int) -> None:
    drafter = ModelDrafter(tiny_runner(num_pages=pages, page_size=size), chain(2))
    before, target = drafter.runner.cache, tiny_runner()
    drafter.attach(target)
    after = drafter.runner.cache
    assert (after.page_size, after.scratch_page) == (target.cache.page_size, target.cache.scratch_page)
    assert (after is before) == ((pages, size) == (200, 4)), "nothing is made anew that fits"


def test_masks_need_room_behind_the_text() -> None:
    drafter = with_masks(Levels((2, 2, 1, 1), Best()), guesses=3)(torch.float64)
    assert (drafter.max_nodes, drafter.depth(drafter.max_nodes)) == (10, 3)
    assert [drafter.staged(size) for size in drafter.sizes] == [0, 0, 1, 2]


# --- in an engine


def test_the_target_as_its_own_draft_model_is_always_right() -> None:
    """Every guess of a chain is accepted: the draft cache is kept right through partial runs and commits."""
    harness = Harness(tiny_runner(), ModelDrafter(tiny_runner(), chain(3)), Match())
    answers = harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=21)), Ask((5,), SamplingParams(max_tokens=9))])
    for answer in answers:
        assert answer.accepted == answer.num_generated - answer.steps
    assert answers[0].steps <= 7


@pytest.mark.parametrize("grower", [Paths(3, 3), Paths(2, 2, trunk=1), Levels((1, 1, 1), Independent())])
def test_drawn_guesses_of_the_target_itself_are_always_right_without_chance(grower) -> None:
    """At temperature 0 all paths are one, merged in the draft cache as in the tree; three tokens a step."""
    harness = Harness(tiny_runner(), ModelDrafter(tiny_runner(), grower), Match())
    (answer,) = harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=21))])
    assert answer.accepted == answer.num_generated - answer.steps
    assert answer.steps <= 7
    assert answer.drafted <= 18, "agreeing paths are one node each"


def test_with_shared_noise_the_target_itself_is_always_right() -> None:
    drafter = ModelDrafter(tiny_runner(), Levels((1, 1, 1), Coupled()))
    harness = Harness(tiny_runner(), drafter, Match())
    asks = [Ask((1, 2, 3), SamplingParams(temperature=1.0, seed=seed, max_tokens=21)) for seed in range(4)]
    for answer in harness.run(asks):
        assert answer.accepted == answer.num_generated - answer.steps
        assert answer.steps <= 7


@pytest.mark.parametrize("prompts", [[(1, 2, 3), (4, 5), (6,), (7, 8, 9)], [(1, 2, 3, 4, 5, 6, 7, 8, 9)] * 4])
def test_preemption_and_shared_prefixes_cost_no_accepted_token(prompts: list[tuple[int, ...]]) -> None:
    regime = Regime(num_pages=24)
    harness = Harness(tiny_runner(num_pages=24), ModelDrafter(tiny_runner(), chain(3)), Match(), regime)
    answers = harness.run([Ask(p, SamplingParams(max_tokens=30), arrives=i) for i, p in enumerate(prompts)])
    assert harness.engine.scheduler.num_preemptions > 0
    for answer in answers:
        assert answer.accepted == answer.drafted > 0


class OnAndOff:
    """Drafts in some steps only."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self.pattern, self.steps = pattern, 0

    def budget(self, load: Load) -> Budget:
        self.steps += 1
        return Budget(self.pattern[self.steps % len(self.pattern)])

    def observe(self, report: StepReport) -> None:
        pass


@pytest.mark.parametrize("pattern", [(3, 0), (0, 2, 2, 0, 0), (1, 3, 0)])
def test_steps_without_drafts_cost_no_accepted_token(pattern: Sequence[int]) -> None:
    """Also where the last token accepted before them was one that the draft model had not run."""
    harness = Harness(tiny_runner(), ModelDrafter(tiny_runner(), chain(3)), Match())
    harness.engine.controller = OnAndOff(pattern)
    asks = [Ask((1, 2, 3), SamplingParams(max_tokens=40)), Ask((5,), SamplingParams(max_tokens=30), arrives=3)]
    for answer in harness.run(asks):
        assert answer.accepted == answer.drafted > 0


@pytest.mark.parametrize(("page_size", "tokens"), [(1, 8), (1, 12), (2, 8), (2, 12)])
def test_the_next_turn_of_a_conversation_finds_nothing_unread(page_size: int, tokens: int) -> None:
    """An answer's last token that the draft model has not run is not shared."""
    regime = Regime(page_size=page_size)
    harness = Harness(tiny_runner(page_size=page_size), ModelDrafter(tiny_runner(), chain(3)), Match(), regime)
    (first,) = harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=tokens))])
    second = harness.answer(1, Ask((*first.tokens, 4), SamplingParams(max_tokens=30)))
    harness.engine.scheduler.add([second])
    while harness.engine.scheduler.has_work:
        harness.engine.step()
    assert second.cached_prompt_tokens > 3
    assert second.accepted == second.drafted > 0


def test_a_draft_model_with_a_smaller_cache_serves_all_sequences() -> None:
    asks = [Ask((i, 2, 3), SamplingParams(max_tokens=20)) for i in range(5)]
    want = generated(Harness(tiny_runner(), NoDrafter(), Match()).run(asks))
    answers = Harness(tiny_runner(), ModelDrafter(tiny_runner(num_pages=12), Levels((2, 1), Best())), Match()).run(asks)
    assert generated(answers) == want
    assert all(answer.accepted > 0 for answer in answers)


@pytest.mark.parametrize("name", ["model", "masks", "kangaroo", "student"])
def test_captured_steps_say_the_same(name: str) -> None:
    """A step ahead of the host, with drafts in some steps only."""
    makers = {
        "masks": with_masks(chain(3)),
        "kangaroo": with_net("kangaroo", chain(3)),
        "student": with_student(chain(3)),
    }
    drafter = makers[name](torch.float64) if name in makers else ModelDrafter(captured.runner(), chain(3))
    if GPU and name in makers:
        pytest.skip("these are made on a CPU")
    # Where everything is accepted, so many tokens are the end of a step: nothing is cut off.
    asks = [Ask((1, 2, 3), SamplingParams(max_tokens=31)), Ask((5,), SamplingParams(max_tokens=26), arrives=3)]
    harness = CapturedHarness(drafter, "match", moody=True)
    answers = harness.run(asks)
    assert generated(answers) == generated(Harness(captured.runner(), NoDrafter(), Match()).run(asks))
    assert harness.runner.ready
    for answer in answers:
        assert answer.drafted > 0
        if name == "model":
            assert answer.accepted == answer.drafted, "the target itself is always right"


def test_a_draft_model_with_a_shorter_context_stops_guessing_there() -> None:
    drafter = ModelDrafter(tiny_runner(tiny_config(max_position_embeddings=12)), chain(3))
    harness = Harness(tiny_runner(), drafter, Match())
    answer = harness.run([Ask((1, 2, 3), SamplingParams(max_tokens=30))])[0]
    assert generated([answer]) == generated(
        Harness(tiny_runner(), NoDrafter(), Match()).run([Ask((1, 2, 3), SamplingParams(max_tokens=30))])
    )
    assert answer.steps > 20


def test_no_nodes_mean_bare_roots() -> None:
    decoding = Decoding(ModelDrafter(tiny_runner(), chain(3)), TEXTS, True)
    assert decoding.propose(decoding.view(), 0).tree.num_drafted == 0
    assert decoding.grower.heard == []
