"""Real weights: Marian en-fr, converted by benchmarks/convert_marian.py to the folder that DRAFTWOOD_MARIAN names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from draftwood import LLM, EngineConfig, SamplingParams

FOLDER = Path(os.environ.get("DRAFTWOOD_MARIAN", "marian-en-fr"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / "model.safetensors").is_file(), reason="DRAFTWOOD_MARIAN names no folder"),
]
TEXTS = (
    "The cat sat on the mat and looked at the rain.",
    "Yesterday the old bridge across the river was closed, and yesterday the old road was closed too.",
    "Windows Server 2019 and Red Hat Enterprise Linux 8.4 run on Intel Xeon Gold 6230 and AMD EPYC 7742 processors.",
)
CONFIG = EngineConfig(threads=1, cache_tokens=2048, device="cpu", dtype="float32")


def test_translations_are_transformers_own_and_drafts_come_from_the_source() -> None:
    from transformers import MarianMTModel

    params = SamplingParams(max_tokens=60)
    with LLM(FOLDER, drafter="ngram:shortest=1", config=CONFIG) as llm:
        found = llm.generate(params=params, encoder_input=list(TEXTS))
        ids = [llm.tokenizer.encode(text) for text in TEXTS]
    with LLM(FOLDER, config=CONFIG) as llm:
        plain = llm.generate(params=params, encoder_input=list(TEXTS))
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    model = MarianMTModel.from_pretrained(FOLDER, trust_remote_code=False, dtype=torch.float32).eval()
    for own, result in zip(ids, found, strict=True):
        with torch.no_grad():
            inputs = torch.tensor([own])
            want = model.generate(
                input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=60, num_beams=1,
                do_sample=False,
            )  # fmt: skip
        assert list(result.token_ids) == want[0, 1:].tolist()
    assert found[0].text == "Le chat s'assit sur le tapis et regarda la pluie."
    assert found[2].stats.tokens_per_step > 1.4, "names are copied"
