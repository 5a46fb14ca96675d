"""A batch of prompts, answered together: the least code that uses the engine."""

from draftwood import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "One, two, three, one, two, three, one, two,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
]

with LLM("smollm2", drafter="ngram") as llm:
    results = llm.generate(PROMPTS, SamplingParams(max_tokens=16))

for prompt, result in zip(PROMPTS, results, strict=True):
    print(f"{prompt!r} -> {result.text!r}")
    print(f"    {result.stats.tokens_per_step:.2f} tokens/step, {result.finish_reason}")

assert [result.prompt for result in results] == PROMPTS
assert all(0 < result.stats.num_tokens <= 16 for result in results)
assert results[1].stats.tokens_per_step > 1, "a counting rhyme is easy to guess"
