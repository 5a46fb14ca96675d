"""litellm, which many programs ask through: chat, tools in a stream, and the Responses API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftwood import LLM, SamplingParams
from serving import NAME, Serving

SCRIPT = Path(__file__).with_name("litellm_client.py")


@pytest.mark.slow
def test_litellm(served: Serving, llm: LLM) -> None:
    offline = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network for prices
    command = [sys.executable, str(SCRIPT), served.url, NAME]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=offline)
    assert told.returncode == 0, told.stderr
    got = json.loads(told.stdout.splitlines()[-1])
    wanted = llm.chat([{"role": "user", "content": "the cat sat"}], SamplingParams(max_tokens=16)).text
    assert (got["whole"], got["streamed"], got["response"]) == (wanted, wanted, wanted)
    assert (got["usage"], got["response_usage"], got["status"]) == (16, 16, "incomplete")
    assert got["calls"] == [["weather", '{"city": "Rome"}']]
    assert got["pieces"] > 2, "the arguments came in one piece"
    assert got["final"] == '{"city": "Rome"}'
    assert got["events"][0] == "response.created"
    assert got["events"].count("response.function_call_arguments.delta") > 2
    assert got["events"][-1] == "response.completed"
    assert "not stored here" in got["refused"]
    assert served.idle()
