"""A drafter of your own: a phrase book that guesses how well-known phrases go on.

Whatever it guesses, the text stays the model's own; a bad drafter costs time, never correctness.
"""

from collections.abc import Sequence

from draftwood import LLM, SamplingParams
from draftwood.drafters.points import PointDrafter, PointTree
from draftwood.model.checkpoint import open_checkpoint


class PhraseBook(PointDrafter):
    """Continues the phrases it knows from wherever the text stands in them."""

    max_nodes = 6

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self._phrases = phrases

    def fill(self, tree: PointTree, seq_id: int, tokens: Sequence[int]) -> None:
        last = list(tokens[-2:])
        for phrase in self._phrases:
            for at in range(2, len(phrase)):
                if list(phrase[at - 2 : at]) == last:
                    tree.add_path(phrase[at : at + self.max_nodes])


PROMPT = "The numbers from one to twenty:\n\none, two, three, four,"
PHRASES = [" one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen"]
PARAMS = SamplingParams(max_tokens=24)

checkpoint = open_checkpoint("smollm2")
book = PhraseBook([checkpoint.tokenizer().encode(phrase, special=False) for phrase in PHRASES])

with LLM(checkpoint, drafter=book) as llm:
    guessed = llm.generate(PROMPT, PARAMS)
with LLM(checkpoint) as llm:
    plain = llm.generate(PROMPT, PARAMS)

print(guessed.text)
print(f"{guessed.stats.steps} steps instead of {plain.stats.steps}")
assert guessed.token_ids == plain.token_ids
assert guessed.stats.accepted > 0
assert guessed.stats.steps < plain.stats.steps
