"""lm-eval, the real one, scores a served model as it scores the same folder with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwood import LLM, SamplingParams
from serving import NAME, Serving

QUESTIONS = [
    {"question": f"{a} and {b} make", "choices": [f" {a + b}", " nothing", f" {a}{b}, I think"], "answer": a % 3}
    for a, b in ((1, 2), (2, 7), (13, 5), (4, 4), (9, 1), (3, 30))
]
TASK = {
    "task": "sums",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
LAST_WORD = {
    "task": "last_word",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
}


def foreseen(llm: LLM) -> dict[str, Any]:
    """A question whose first choice is what the model says anyway."""
    prompts = [f"Word {i}:" for i in range(40)]
    said = [result.token_ids[0] for result in llm.generate(prompts, SamplingParams(max_tokens=1))]
    pieces = [llm.tokenizer.piece(token) for token in said]
    question, piece = next(
        (p, piece) for p, piece in zip(prompts, pieces, strict=True) if piece.isascii() and piece.decode().isalnum()
    )
    return {"question": question, "choices": [piece.decode(), " no", " perhaps"], "answer": 0}


@pytest.fixture
def tasks(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Small tasks on a local file; nothing is looked for elsewhere."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*QUESTIONS, foreseen(llm)]))
    files = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "datasets")}
    return [task | {"dataset_kwargs": files} for task in (TASK, LAST_WORD)]


def scored(tasks: list[dict[str, Any]], model: Any, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        model_args=settings,
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),  # thousands of files
        batch_size=4,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert found is not None
    return found


def transformers_model(folder: Path) -> Any:
    """The folder in transformers, as lm-eval's own `hf` model scores it; that one needs a package more (accelerate)."""
    import torch
    from lm_eval.api.model import TemplateLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class Reference(TemplateLM):
        """One continuation after the other, no cache, no padding."""

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)

        @property
        def eot_token_id(self) -> int:
            return self.tokenizer.eos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return self.tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return [self._score(context, continuation) for _, context, continuation in requests]

        def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
            tokens = torch.tensor([context + continuation])
            with torch.inference_mode():
                rows = torch.log_softmax(self._model(tokens).logits[0, len(context) - 1 : -1], -1)
            own = rows.gather(1, tokens[0, len(context) :, None])
            return float(own.sum()), bool((rows.argmax(-1) == tokens[0, len(context) :]).all())

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError

    return Reference()


def likelihoods(found: dict[str, Any], task: str) -> list[tuple[float, bool]]:
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    pairs = [answer[0] for sample in samples for answer in sample["resps"]]
    return [(float(value), bool(greedy)) for value, greedy in pairs]


@pytest.mark.filterwarnings("ignore")
def test_scores_equal_those_of_transformers(served: Serving, folder: Path, tasks: list[dict[str, Any]]) -> None:
    ours = scored(
        tasks,
        "local-completions",
        {
            "model": NAME,
            "base_url": f"{served.url}/v1/completions",
            "tokenizer": str(folder),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 1,
            "tokenized_requests": True,
            "max_length": 512,
        },
    )
    theirs = scored(tasks, transformers_model(folder))
    for task in ("sums", "last_word"):
        mine, wanted = likelihoods(ours, task), likelihoods(theirs, task)
        assert len(mine) == len(wanted) > len(QUESTIONS)
        assert [value for value, _ in mine] == pytest.approx([value for value, _ in wanted], abs=1e-3)
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in wanted]
        for name, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][name] == pytest.approx(value, rel=1e-4)
    assert {greedy for _, greedy in likelihoods(ours, "last_word")} == {True, False}
    assert len({round(value, 3) for value, _ in likelihoods(ours, "sums")}) > len(QUESTIONS)
    assert served.idle()
