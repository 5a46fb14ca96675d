"""What is asked: six prompts of ours in the spirit of Spec-Bench's tasks, or those of a file or a folder."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from draftwood.model.tokenizer import Tokenizer

BUILT_IN = (
    "I have a free weekend and a small balcony. What could I grow there, and how do I start?",
    "Explain to a ten-year-old why the moon seems to change its shape over a month.",
    "Summarise this text in two sentences: The old harbour of Vellin was built for sailing ships. When steamers came, "
    "its basin was too shallow, and the town moved its trade to a new harbour three kilometres to the north. The old "
    "basin silted up and became a home for herons and otters. Today the old harbour is a nature reserve, the new "
    "harbour handles timber and grain, and a narrow railway that once linked the two carries visitors in summer.",
    "Rewrite the following in plain modern English, sentence by sentence: 'It was with no small measure of "
    "trepidation that the undersigned did approach the aforesaid dwelling. The door thereof stood ajar, and from "
    "within there issued a sound as of many clocks striking. The undersigned did thereupon resolve to enter.'",
    "A baker sells rolls at 3 for 2 euros. On Monday she sells 84 rolls, on Tuesday half as many, and on Wednesday 15 "
    "more than on Tuesday. How much money does she take in over the three days? Show every step.",
    "Complete this Python module:\n\n"
    "class Stack:\n"
    '    """A stack of bounded size."""\n\n'
    "    def __init__(self, limit):\n"
    "        self.limit = limit\n"
    "        self.items = []\n\n"
    "    def push(self, item):\n"
    '        """Add an item, or raise OverflowError if the stack is full."""\n',
)
ORDINARY_TOKENS = range(1000, 40000)


def from_file(path: Path) -> list[str]:
    """One prompt a line."""
    return [line for line in path.read_text().splitlines() if line.strip()]


def from_folder(folder: Path, every: int) -> list[str]:
    """The first turn of every `every`-th line {id, task, turns} of all its .jsonl files."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines() if line.strip()]
    return [json.loads(line)["turns"][0] for line in lines[::every]]


def encoded(tokenizer: Tokenizer, prompts: Iterable[str], number: int) -> list[list[int]]:
    """Prompts as chats of one turn. Another `number`, another first word: nobody's prefix cache finds anything."""
    system = {"role": "system", "content": f"{number}. You are a helpful assistant."}
    chats = [tokenizer.render_chat([system, {"role": "user", "content": prompt}]) for prompt in prompts]
    return [tokenizer.encode(chat, special=False) for chat in chats]


def noise(length: int, number: int) -> list[int]:
    """Random tokens, for measures that do not depend on what they are."""
    return random.Random(number).choices(ORDINARY_TOKENS, k=length)
