"""A second model as drafter, with a tree of guesses.

The embedded model drafts for itself here, which gains no time but needs nothing else. For a gain, take a target that
is ten times the drafter's size and shares its vocabulary: LLM("org/big", drafter="model:org/small", tree="beam").
"""

from draftwood import LLM, SamplingParams

PROMPT = "Water boils at"

for law, tree, temperature in (
    ("match", "beam:nodes=8,width=2,depth=3", 0.0),
    ("walk", "sampled:widths=2x1x1", 0.8),
):
    with LLM("smollm2", drafter="model:smollm2", law=law, tree=tree) as llm:
        result = llm.generate(PROMPT, SamplingParams(max_tokens=16, temperature=temperature, seed=1))
    stats = result.stats
    print(f"{law}, {tree}: {PROMPT}{result.text!r}")
    print(
        f"    {stats.tokens_per_step:.2f} tokens/step, {stats.acceptance:.0%} of {stats.drafted} guesses accepted"
    )
    assert stats.tokens_per_step > 2, "a drafter that is the target itself is mostly right"
