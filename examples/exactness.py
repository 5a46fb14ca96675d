"""The promise, checked: with a seed, the law `match` gives the very tokens plain decoding gives."""

from draftwood import LLM, SamplingParams
from draftwood.model.checkpoint import open_checkpoint

PROMPTS = ["Monday, Tuesday, Wednesday, Monday, Tuesday,", "My favourite animal is"]
SAMPLINGS = {
    "T=0": SamplingParams(max_tokens=16),
    "T=1": SamplingParams(max_tokens=16, temperature=1.0, seed=7),
    "T=1, top-p 0.9": SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=8),
}

checkpoint = open_checkpoint("smollm2")
tokens: dict[str, dict[tuple[str, str], tuple[int, ...]]] = {}
for drafter in ("none", "ngram:nodes=6,branches=2,shortest=1"):
    with LLM(checkpoint, drafter=drafter, law="match") as llm:
        tokens[drafter] = {
            (name, prompt): llm.generate(prompt, params).token_ids
            for name, params in SAMPLINGS.items()
            for prompt in PROMPTS
        }

plain, speculative = tokens.values()
for name, prompt in plain:
    same = plain[name, prompt] == speculative[name, prompt]
    print(f"{name:15} {prompt!r}: {'identical' if same else 'DIFFERENT'}")
    assert same
