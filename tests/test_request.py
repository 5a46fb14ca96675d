from __future__ import annotations

import math

import pytest

from draftwood.errors import DraftwoodError, InvalidRequest
from draftwood.request import FinishReason, SamplingParams, SpeculationStats


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n must"),
        ({"n": 2}, "same answer"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ("x", "")}, "stop strings"),
        ({"bad_words": ("",)}, "bad words"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logit_bias": {1: math.inf}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 1e39}}, "logit_bias"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"temperature": 1e-9, "n": 2}, "same answer"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9 and max_tokens is 8"),
        ({"temperature": True}, "temperature"),
        ({"trace": 1}, "trace"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(bad: dict, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**bad)
    assert isinstance(caught.value, DraftwoodError)
    assert isinstance(caught.value, ValueError)


def test_a_single_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


def test_what_a_request_needs() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(top_p=0.5).truncates, "greedy decoding has nothing to truncate"
    assert SamplingParams(temperature=1.0, min_p=0.1).truncates
    assert SamplingParams(frequency_penalty=0.1).penalises


def test_statistics_of_nothing_are_zero() -> None:
    empty = SpeculationStats()
    assert (empty.tokens_per_step, empty.acceptance, empty.tokens_per_second) == (0.0, 0.0, 0.0)
    full = SpeculationStats(steps=2, drafted=8, accepted=4, num_tokens=6, seconds=3.0)
    assert (full.tokens_per_step, full.acceptance, full.tokens_per_second) == (3.0, 0.5, 2.0)


def test_reasons_read_as_words() -> None:
    assert f"{FinishReason.LENGTH}" == "length"
