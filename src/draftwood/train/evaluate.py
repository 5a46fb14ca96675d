"""What a network is worth: on texts held out from training, and by real speculative decoding."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from draftwood.assembly import build_grower, load_parallel, student_drafter
from draftwood.config import EngineConfig
from draftwood.drafters.trained import drafter_of, usual_tree
from draftwood.drafting import Drafter
from draftwood.engine.controller import FixedBudget
from draftwood.engine.llm import LLM
from draftwood.engine.worker import ComputeThread
from draftwood.errors import DraftwoodError, InvalidRequest
from draftwood.model.checkpoint import Checkpoint
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.shared import SharedWords
from draftwood.nets.student import MaskedStudent, Student
from draftwood.protocols import StepReport
from draftwood.request import FinishReason, SamplingParams
from draftwood.train.data import Corpus, PackedBatches, TextBatch
from draftwood.train.recipes import Made
from draftwood.verifiers import default_law

MAX_PROMPTS = 16  # answered at each temperature
MAX_TOKENS = 128  # of each answer


def held_out_batches(corpus: Corpus, rows: int, length: int) -> list[TextBatch]:
    """Nearly all texts, in batches of at most `rows` that are equally large, so that none is left half empty."""
    packed = len(PackedBatches(corpus, 1, length))
    count = math.ceil(packed / rows)
    return list(PackedBatches(corpus, packed // count, length).epoch(0, 0))


@torch.no_grad()
def held_out_figures(method: Made, batches: Iterable[TextBatch]) -> dict[str, float]:
    """Means of what a method reports, without learning from it: `agree_1`, `accept_1`, … and `loss`.

    `chain` is how many tokens a step of a chain of the likeliest guesses would give. The same batches always give the
    same figures, whatever is drawn elsewhere.
    """
    module, device = method.module, next(method.module.parameters()).device.type
    training = module.training
    module.eval()
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    with torch.random.fork_rng(devices=[]), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        torch.default_generator.manual_seed(0)  # anchors are drawn on the host
        for batch in batches:
            found = {name: float(value) for name, value in method.losses(batch).items()}
            tokens = found.pop("tokens")
            weights["tokens"] = weights.get("tokens", 0.0) + tokens
            for name, value in found.items():
                if math.isfinite(value):  # answers too short for a depth say nothing about it
                    sums[name] = sums.get(name, 0.0) + value * tokens
                    weights[name] = weights.get(name, 0.0) + tokens
    module.train(training)
    if "agree_1" not in sums:
        raise InvalidRequest("The answers that are held out are too short to judge a drafter by: hold out more.")
    means = {name: value / weights[name] for name, value in sums.items()}
    return means | {"chain": _chain(means), "tokens": weights["tokens"]}


def _chain(means: dict[str, float]) -> float:
    """Tokens of a step: the target's own, and each guess if it and all before it are right."""
    depths = itertools.takewhile(lambda name: name in means, (f"agree_{depth}" for depth in itertools.count(1)))
    return 1 + sum(itertools.accumulate((means[name] for name in depths), lambda alive, agree: alive * agree))


@dataclass(frozen=True)
class Decoded:
    """What came of decoding for real."""

    tokens_per_step: float
    accepted: tuple[float, ...]  # at each depth, of the steps that got there
    num_tokens: int


class Tally(FixedBudget):
    """The whole tree in every step, whatever pays on this machine, and how far each one came."""

    def __init__(self, max_nodes: int) -> None:
        super().__init__(max_nodes)
        self.outcomes: list[tuple[int, int]] = []  # (drafted, accepted) of each sequence and step

    def observe(self, report: StepReport) -> None:
        """Remember those that had a draft."""
        self.outcomes += [outcome for outcome in report.outcomes if outcome[0]]

    def by_depth(self) -> tuple[float, ...]:
        """How often the guess at each depth was right where those before it were; drafts cut short do not count."""
        rates = []
        deepest = max((max(accepted, 1) for _, accepted in self.outcomes), default=0)
        for depth in range(1, 1 + deepest):
            there = [accepted for drafted, accepted in self.outcomes if drafted >= depth and accepted >= depth - 1]
            rates.append(sum(accepted >= depth for accepted in there) / len(there))
        return tuple(rates)


def decode_figures(
    net: nn.Module,
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    *,
    tree: str | None = None,
    max_tokens: int = MAX_TOKENS,
    device: str = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """Tokens a step at temperatures 0 and 1, by decoding prompts (of tokens) with a copy of the network as drafter.

    The tree is the one such a network gets on a CPU, wherever this runs, so that figures can be compared; the law is
    the lossless one that goes with it.
    """
    tree = tree or usual_tree(type(net), torch.device("cpu"))
    room = sum(len(prompt) + max_tokens + 2 * EngineConfig.page_size for prompt in prompts)
    config = EngineConfig(device=device, cache_tokens=room, max_running=len(prompts)).settled()
    drafter = ComputeThread.shared().call(lambda: drafter_for(net, checkpoint, tree, config))
    tally = Tally(drafter.max_nodes)
    figures: dict[str, Any] = {"tree": tree}
    with LLM(checkpoint, drafter=drafter, config=config, controller=tally) as llm:
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            tally.outcomes.clear()
            law = default_law(drafter.law)
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, law=law)
            figures[name] = asdict(_decode(llm, prompts, params, tally))
    return figures


def _decode(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, tally: Tally) -> Decoded:
    results = llm.generate(prompts, params)
    failed = [result.completions[0].error for result in results if result.finish_reason == FinishReason.ERROR]
    if failed:
        raise DraftwoodError(f"Decoding with the new drafter failed: {failed[0]}")
    tokens = sum(result.stats.num_tokens for result in results)
    return Decoded(tokens / sum(result.stats.steps for result in results), tally.by_depth(), tokens)


def drafter_for(net: nn.Module, checkpoint: Checkpoint, tree: str, config: EngineConfig) -> Drafter:
    """A copy of a network as drafter, so that training can go on with the network itself."""
    if isinstance(net, Student):
        own = {name: value.detach().to("cpu", copy=True) for name, value in net.state_dict().items()}
        student = SharedWords("student", net.config, own, checkpoint)
        if isinstance(net, MaskedStudent):
            marks = {"pard_token": net.mask_token, "draftwood": {"guesses": net.guesses}}
            return load_parallel(student, marks, tree, checkpoint, config)
        return student_drafter(student, tree, config)
    words = TargetEmbeddings(checkpoint, config.torch_device(), config.torch_dtype())
    return drafter_of(copy.deepcopy(net), words, build_grower(tree))
