"""What the GPU benchmark asks: eight chats for the speeds, sixty-four for the equality of strict mode."""

from __future__ import annotations

import itertools

from cpu_prompts import BUILT_IN, encoded
from draftwood.model.tokenizer import Tokenizer

CHAT8 = (
    "Write a Python function that returns the n-th Fibonacci number using memoization, with a docstring and two "
    "examples.",
    "Explain why the sky is blue in three sentences.",
    "A train leaves at 3 pm and travels at 60 km/h. Another leaves at 4 pm from the same station at 90 km/h. When does "
    "the second catch the first? Show each step.",
    "Summarize the following text in two sentences: The Great Barrier Reef is the world's largest coral reef system, "
    "composed of over 2,900 individual reefs and 900 islands stretching for over 2,300 kilometres. The reef is located "
    "in the Coral Sea, off the coast of Queensland, Australia. It supports a wide diversity of life and was selected "
    "as a World Heritage Site in 1981. A large part of the reef is protected by the Great Barrier Reef Marine Park, "
    "which helps to limit the impact of human use, such as fishing and tourism.",
    "Translate to French: The weather is nice today, and we are going to the beach with our friends.",
    "Give me a packing list for a week of hiking in the mountains, as bullet points with a short reason for each.",
    "Write a short email to a customer apologising for a late delivery and offering a discount.",
    "Who was Ada Lovelace, and why is she important in the history of computing?",
)
CODE8 = (
    "Write a Python function `merge_intervals(intervals)` that merges overlapping intervals, with hints and a test.",
    "Write a Python class `Stack` with push, pop, peek and is_empty, and show how it is used.",
    'Complete this function:\n\ndef is_palindrome(text: str) -> bool:\n    """Ignore case and punctuation."""\n',
    "Write a SQL query that lists the five customers with the highest total of orders in 2023, and explain each line.",
    "Write a JavaScript function that removes duplicates from an array of objects by their `id`.",
    "Write a Python script that reads a CSV file and prints the mean of every numeric column.",
    "Implement binary search in Python, both as a loop and recursively, with comments.",
    "Write a C function that reverses a singly linked list in place, with the struct it needs.",
)
MATHS8 = (
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether? Show each step.",
    "A shop sells pens at 3 dollars and notebooks at 5. Ben buys 4 pens and 6 notebooks with 50 dollars. What is left?",
    "Solve 3x + 7 = 2x + 19 step by step, and check the answer.",
    "A tank holds 240 litres and is filled at 12 litres a minute while 4 a minute leak out. When is it full?",
    "What is 15 % of 840, plus a quarter of 96? Write down each step.",
    "Three friends share 84 marbles in the ratio 2 : 3 : 7. How many does each get? Explain step by step.",
    "A rectangle is 5 cm longer than it is wide, and its perimeter is 58 cm. Find its area, step by step.",
    "A car needs 7 litres for 100 km. How many litres does it need for 450 km, and what do they cost at 1.80 a litre?",
)
SUBJECTS = ("tides", "bread", "chess", "volcanoes", "bicycles", "the heart", "violins", "bees", "glass", "Lisbon")
QUESTIONS = (
    "Explain to a curious child how {} came to be what we know today.",
    "Write a short poem about {} with four lines.",
    "List five facts about {}, each with one sentence of explanation.",
    "Write a Python dictionary that describes {}, with keys name, kind and notes, and print it.",
    "What are the commonest mistakes people make when they talk about {}?",
)
STRICT64 = (*CHAT8, *BUILT_IN, *(q.format(s) for q, s in itertools.product(QUESTIONS, SUBJECTS)))


def chats(tokenizer: Tokenizer, texts: tuple[str, ...], number: int, start: int = 0) -> list[list[int]]:
    """Token ids of `number` chats, `texts` in turn, their system messages counted from `start`.

    No two chats agree beyond the number, which lies in the first page: a prefix cache finds nothing, just as the
    engines we compare with had none.
    """
    return [encoded(tokenizer, [texts[i % len(texts)]], start + i)[0] for i in range(number)]
