"""The laboratory's run: answers of a real pair of models, places in them, trees there, and every law on the trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftwood.drafters.model import ModelDrafter
from draftwood.engine.llm import LLM, Prompt
from draftwood.engine.worker import ComputeThread
from draftwood.errors import InvalidRequest
from draftwood.lab.replay import Results, growers
from draftwood.lab.rows import Recorder, Rows
from draftwood.request import SamplingParams

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """What is measured, and how much of it."""

    temperatures: tuple[float, ...] = (0.2, 0.6, 1.0)
    paths: int = 4
    depth: int = 5
    contexts: int = 32  # at each temperature
    tokens: int = 64  # of every answer
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) <= 0:
            raise InvalidRequest("Temperatures must be above 0: without chance all laws are the longest match.")
        if not 1 <= self.paths <= 8 or self.depth < 2 or self.contexts < 1 or self.tokens < 1:
            raise InvalidRequest("Choose 1 to 8 paths, a depth of at least 2, and at least one context and token.")


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, or JSON lines with `turns`, `prompt` or `text`; the first turn counts."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The prompts cannot be read: {error}.") from error
    prompts = [_prompt(line, path) for line in lines]
    if not prompts:
        raise InvalidRequest(f"There are no prompts in '{path}'.")
    return prompts


def _prompt(line: str, path: Path) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"A line of '{path}' begins like JSON but is none: {error}.") from error
    found = entry.get("turns") or entry.get("prompt") or entry.get("text")
    found = found[0] if isinstance(found, list) and found else found
    if not isinstance(found, str) or not found.strip():
        raise InvalidRequest(f"A line of '{path}' has no 'turns', 'prompt' or 'text' to read.")
    return found


def record(llm: LLM, prompts: Sequence[str], setting: Setting, say: Say = lambda _: None) -> Iterator[Rows]:
    """Rows of all trees, context after context. Every law will see the same ones."""
    drafter = llm.engine.drafter
    if not isinstance(drafter, ModelDrafter):
        raise InvalidRequest("The laboratory needs a draft model: --drafter model:NAME, or student with smollm2.")
    recorder = Recorder(llm.engine.target, drafter, llm.config.max_rows)
    each = -(-setting.contexts // len(prompts))
    number = 0
    for temperature in setting.temperatures:
        for index, prompt in enumerate(prompts):
            wanted = min(each, setting.contexts - index * each)
            if wanted < 1:
                break
            params = SamplingParams(temperature=temperature, max_tokens=setting.tokens, seed=setting.seed + index)
            for tokens in _places(llm, prompt, params, wanted):
                say(f"temperature {temperature:g}, prompt {index + 1} of {len(prompts)}, {len(tokens)} tokens")
                yield from _record_trees(recorder, number, tokens, params, setting)
                number += 1
            ComputeThread.shared().call(recorder.forget)


def _places(llm: LLM, prompt: str, params: SamplingParams, wanted: int) -> Iterator[list[int]]:
    """Beginnings of the target's own answer, evenly spread."""
    chat: Prompt = [{"role": "user", "content": prompt}] if llm.tokenizer.has_chat_template else prompt
    result = llm.generate([chat], params)[0]
    answer = list(result.token_ids)
    if not answer:
        raise InvalidRequest(f"A prompt could not be answered: {result.completions[0].error}")
    for i in range(wanted):
        yield [*result.prompt_token_ids, *answer[: 1 + i * len(answer) // wanted]]


def _record_trees(
    recorder: Recorder, number: int, tokens: list[int], params: SamplingParams, setting: Setting
) -> Iterator[Rows]:
    for family, grower in growers(setting.depth, setting.paths).items():

        def order(family: str = family, grower: object = grower) -> Rows:
            with torch.inference_mode():
                return recorder.record(number, tokens, params, family, grower)  # type: ignore[arg-type]

        yield ComputeThread.shared().call(order)


def replay(rows: Iterator[Rows], setting: Setting, save: Path | None = None, say: Say = lambda _: None) -> Results:
    """Every law on every tree; rows are kept only where they are wanted."""
    results = Results()
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
    try:
        for row in rows:
            if save is not None:
                row.save(save)
            ComputeThread.shared().call(lambda row=row: results.add(row, setting.depth, setting.paths))
    except KeyboardInterrupt:
        say("Stopped: the report is about what was measured so far.")
    return results
