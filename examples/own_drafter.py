"""A drafter of your own: a phrase book that proposes how well-known phrases continue.

A wrong proposal costs time, never correctness: the text is the model's own in either case.
"""

from collections.abc import Sequence

from draftwood import LLM, SamplingParams
from draftwood.extend import PointDrafter, PointTree


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

with LLM("smollm2") as llm:
    plain = llm.generate(PROMPT, PARAMS)
    book = PhraseBook([llm.tokenizer.encode(phrase, special=False) for phrase in PHRASES])
with LLM("smollm2", drafter=book) as llm:
    guessed = llm.generate(PROMPT, PARAMS)

print(guessed.text)
print(f"{guessed.stats.steps} steps instead of {plain.stats.steps}")
assert guessed.token_ids == plain.token_ids
assert guessed.stats.accepted > 0
assert guessed.stats.steps < plain.stats.steps
