"""A second model as drafter, with a tree of guesses.

The embedded model drafts for itself here, which gains no time but needs nothing else. For a gain, take a
target ten times the size of the drafter and with the same vocabulary:
LLM("org/big", drafter="model:org/small", tree="beam").
"""

from draftwood import LLM, SamplingParams
from draftwood.engine.controller import FixedBudget

PROMPT = "Water boils at"

# On a calibrated machine the budget would notice that this drafter is as slow as its target, and ask it for nothing.
always = FixedBudget(8)
with LLM("smollm2", drafter="model:smollm2", tree="beam:nodes=8,width=2,depth=3", controller=always) as llm:
    for temperature in (0.0, 0.8):
        result = llm.generate(PROMPT, SamplingParams(max_tokens=16, temperature=temperature, seed=1))
        stats = result.stats
        print(f"T={temperature}: {PROMPT}{result.text!r}")
        print(f"    {stats.tokens_per_step:.2f} tokens/step, {stats.accepted} of {stats.drafted} accepted")
        assert stats.accepted > 0
        if temperature == 0:
            assert stats.tokens_per_step > 2, "a drafter that is the target itself is mostly right"
