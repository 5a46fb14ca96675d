"""An acceptance law of your own: target sampling on chosen tokens, written as odds.

At every node the target's next token is a child with the probability the target gives that child. So a node is reached
with the product of the probabilities on its path, and the path ends there if the next token is none of its children.
"""

import torch
from torch import Tensor

from draftwood import LLM, SamplingParams
from draftwood.extend import Draw, NodeLaw, Odds, Scope, TokenTree


class TargetSampling(NodeLaw):
    """Keep each child with the target's own probability. Exact if siblings differ: independent draws may repeat one."""

    name = "target-sampling"
    scope = Scope(draws=frozenset({Draw.POINT}))

    def odds(self, tree: TokenTree, p: Tensor) -> Odds:
        drafted = (tree.parents >= 0).nonzero().view(-1)  # all nodes but the roots; parents come before children
        chance = p[tree.parents[drafted], tree.tokens[drafted]].double()
        reach = torch.ones(tree.num_nodes, dtype=torch.float64, device=p.device)
        for node, given_parent in zip(drafted, chance, strict=True):
            reach[node] = reach[tree.parents[node]] * given_parent
        onward = torch.zeros_like(reach).index_add(0, tree.parents[drafted], reach[drafted])

        def left(nodes: Tensor) -> Tensor:
            """The target's rows without the tokens of children: those would have been accepted."""
            rows = p.clone()
            rows[tree.parents[drafted], tree.tokens[drafted]] = 0
            return rows[nodes]

        return Odds(stop=(reach - onward).clamp(min=0), left=left)


def main() -> None:
    prompt = "Monday, Tuesday, Wednesday, Thursday, Monday, Tuesday, Wednesday, Thursday, Monday,"
    with LLM("smollm2", drafter="ngram", law=TargetSampling()) as llm:
        drawn = llm.generate(prompt, SamplingParams(max_tokens=24, temperature=0.7, seed=1))
        greedy = llm.generate(prompt, SamplingParams(max_tokens=24))
    with LLM("smollm2") as llm:
        plain = llm.generate(prompt, SamplingParams(max_tokens=24))
    print(f"T=0.7: {drawn.text!r}, {drawn.stats.tokens_per_step:.2f} tokens/step")
    print(f"T=0: {greedy.text!r}, {greedy.stats.tokens_per_step:.2f} tokens/step")
    assert drawn.stats.accepted > 0
    assert greedy.token_ids == plain.token_ids


if __name__ == "__main__":
    main()
