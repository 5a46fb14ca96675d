"""Several ranks give the tokens of one process, whatever guesses and however hard the schedule is; and end together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from coverage import Coverage
from torch import Tensor

from adapters import adapter_tensors, llama_modules, write_adapter
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.batch import ForwardBatch
from draftwood.drafters.none import NoDrafter
from draftwood.errors import InvalidRequest
from draftwood.model.config import ModelConfig
from draftwood.model.runner import Model, ModelRunner
from draftwood.model.sharding import ShardedCheckpoint, sharded
from draftwood.model.stages import StageCheckpoint, StageModel, stages_of
from draftwood.model.transformer import Transformer
from draftwood.model.universal_ranks import split
from draftwood.model.weights import FORMATS
from draftwood.protocols import Span
from draftwood.request import FinishReason
from families import FAMILIES, RECURRENT
from spmd import CASES, STARVED
from staging import text_batch
from tiny import TinyCheckpoint, hf_config, tiny_config, tiny_folder

TESTS = Path(__file__).parent.parent


def counted() -> list[str]:
    """Options that have a child's lines counted, where those of this process are."""
    current = Coverage.current()
    if current is None:
        return []
    file, rules = current.get_option("run:data_file"), TESTS.parent / "pyproject.toml"
    return ["-m", "coverage", "run", "--parallel-mode", f"--data-file={file}", f"--rcfile={rules}"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every case gave, of both ranks: two processes for all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([str(TESTS), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DRAFTWOOD_HOME": str(folder / "home")}
    command = [sys.executable, "-W", "error", *counted(), str(TESTS / "spmd.py")]
    both = [subprocess.Popen([*command, str(rank), str(folder)], env=environment) for rank in range(2)]
    try:
        assert [process.wait(120) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
    return {"0": json.loads((folder / "0.json").read_text()), "1": json.loads((folder / "1.json").read_text())}


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_one_process(found: dict[str, Any], name: str) -> None:
    case, came = CASES[name], found["0"][name]
    assert came["got"] == came["want"]
    assert all(came["text"])
    assert came["pages"] == case.regime.num_pages, "pages leaked"
    assert sum(map(len, came["got"])) > 50
    if case.regime == STARVED:
        assert came["preemptions"] > 0, "the cache was not scarce enough to test anything"


def test_a_rank_holds_a_part(found: dict[str, Any]) -> None:
    """Half of the pages and of the layers; of the rest, half of the head."""
    came, config = found["0"]["greedy"], tiny_config()
    rows = 8 * config.hidden_size  # bytes of a token's embedding, of its row of the head, or of a norm
    norms = 2 * config.num_layers + 1
    whole, part = came["bytes"]
    layers = whole - (2 * config.vocab_size + 2 * norms) * rows - 8 * norms  # norms keep a second, scaled weight
    assert part == whole - layers // 2 - (config.vocab_size - 7) * rows
    assert came["cache"][1] * 2 == came["cache"][0]


def test_a_stage_holds_its_layers_and_the_words_it_needs(found: dict[str, Any]) -> None:
    came, last_norm = found["0"]["stages-greedy"], 2 * 8 * tiny_config().hidden_size + 8
    whole, part = came["bytes"]
    assert part == (whole - last_norm) // 2 + last_norm  # which both have
    assert came["cache"][1] * 2 == came["cache"][0]


def test_stages_are_busy_at_the_same_time(found: dict[str, Any]) -> None:
    """With a drafter that remembers its last proposal they take turns."""
    assert found["0"]["stages-sampled-tree"]["in_flight"] == found["0"]["stages-of-features"]["in_flight"] == 1
    assert found["0"]["stages-remembers"]["in_flight"] == 0


def test_every_stage_has_about_as_much_to_read() -> None:
    config = tiny_config(layers=12, vocab_size=1000)
    assert stages_of(config, 1) == [range(12)]
    assert [len(layers) for layers in stages_of(config, 3)] == [5, 6, 1]  # the head is worth four of them
    assert [len(layers) for layers in stages_of(config, 12)] == [1] * 12
    for family, size, reason in (("lfm2", 2, "recurrent"), ("llama", 3, "it has 2 layers")):
        with pytest.raises(InvalidRequest, match=reason):
            stages_of(tiny_config() if family == "llama" else ModelConfig.from_hf(FAMILIES[family]), size)


def test_ranks_that_diverge_stop(found: dict[str, Any]) -> None:
    follower, leader = found["1"]["diverged"], found["0"]["diverged"]
    assert "has not computed what rank 0 has" in follower["error"]
    assert follower["error"] in leader["error"]
    assert leader["error"].startswith("Rank 1 has stopped")
    assert leader["steps"] <= 2  # it went unnoticed for one step at most


@pytest.mark.parametrize(
    ("family", "size", "weights", "reason"),
    [
        ("olmo2", 2, "stored", "norms all heads of a row together"),
        ("gemma2", 3, "stored", "4 attention heads do not divide by 3"),
        ("gemma2", 4, "stored", "2 key-value heads do not divide by 4"),
        ("gemma2", 2, "int8", "groups of 32"),
    ],
)
def test_what_does_not_divide_is_refused(family: str, size: int, weights: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        sharded(ModelConfig.from_hf(FAMILIES[family]), size, FORMATS[weights])


class InLine:
    """Stages of this process that run one after the other: what one posts is there when the next one asks."""

    def __init__(self, rank: int, size: int, line: deque[Tensor]) -> None:
        self.rank, self.size, self._line = rank, size, line

    def post(self, rows: Tensor, to: int) -> None:
        assert to == self.rank + 1
        self._line.append(rows.clone())

    def receive(self, rows: Tensor, source: int) -> Tensor:
        return rows.copy_(self._line.popleft())

    def tell(self, tensors: Sequence[Tensor], number: int) -> None:
        pass


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_three_stages_give_the_logits_of_one(dtype: torch.dtype, tied: bool) -> None:
    """In float32 our CPU kernels run each: to the bit. The one in the middle has neither embedding nor head."""
    checkpoint = TinyCheckpoint(tiny_config(layers=4, tie_word_embeddings=tied))
    line: deque[Tensor] = deque()
    for rank in range(3):
        part = StageCheckpoint(checkpoint, InLine(rank, 3, line))  # type: ignore[arg-type]
        runner = ModelRunner.load(part, dtype, torch.device("cpu"), 8, 16)
        assert isinstance(runner.model, StageModel)
        made = runner.model.begin(staged_text(runner), runner.cache.memory, frozenset())
    whole = ModelRunner.load(checkpoint, dtype, torch.device("cpu"), 8, 16)
    want = whole.forward(staged_text(whole)).logits
    assert (made.own.logits - want).abs().max() <= (1e-12 if dtype == torch.float64 else 0)


def test_models_that_have_a_state_or_read_a_source_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="encoder or recurrent layers"):
        sharded(ModelConfig.from_hf(RECURRENT["lfm2"]), 2, FORMATS["stored"])


@pytest.mark.parametrize(
    ("style", "part", "reason"),
    [
        ("mla_kv_a_proj", torch.nn.Linear(4, 4), "asks for 'mla_kv_a_proj'"),
        ("colwise", torch.nn.Embedding(4, 4), "an? Embedding"),
        ("rowwise", torch.nn.Linear(5, 4), "do not divide"),
    ],
)
def test_plans_that_are_not_known_are_refused(style: str, part: torch.nn.Module, reason: str) -> None:
    modules: Any = torch.nn.Sequential(part)
    modules.tp_plan = {"*": style}
    with pytest.raises(InvalidRequest, match=reason):
        split(modules, InTurn(0, {}))


class InTurn:
    """Two ranks that are threads of this process, one of which runs at a time: Triton's interpreter wants that."""

    size = 2

    def __init__(self, rank: int, state: dict[str, Any]) -> None:
        self.rank, self._state = rank, state

    def _all(self, part: Tensor) -> list[Tensor]:
        state, condition = self._state, self._state["condition"]
        with condition:
            parts = state["parts"] if self.rank else state.__setitem__("parts", []) or state["parts"]
            parts.append(part.clone())
            self.pass_on()
            condition.wait_for(lambda: state["turn"] == self.rank, timeout=60)
        return parts

    def pass_on(self) -> None:
        with self._state["condition"]:
            self._state["turn"] = 1 - self.rank
            self._state["condition"].notify_all()

    def sum(self, part: Tensor) -> Tensor:
        return torch.stack(self._all(part)).sum(0)

    def side_by_side(self, part: Tensor) -> Tensor:
        return torch.cat(self._all(part), -1)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_gpu_kernels_sum_over_ranks(family: str) -> None:
    """In Triton's interpreter, a layer of which is fused elsewhere and one with norms behind its products."""
    pytest.importorskip("triton")
    from draftwood.model.cuda import CudaTransformer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoint = TinyCheckpoint(ModelConfig.from_hf(hf_config(family, **sizes)))
    plain = Transformer(checkpoint, torch.float32, device)
    state: dict[str, Any] = {"turn": 0, "condition": threading.Condition()}

    def logits(rank: int) -> Tensor:
        ranks = InTurn(rank, state)
        with state["condition"]:
            state["condition"].wait_for(lambda: state["turn"] == rank, timeout=60)
        try:
            part = ShardedCheckpoint(checkpoint, ranks, FORMATS["stored"])
            return logits_of(CudaTransformer(part, torch.float32, device))
        finally:
            ranks.pass_on()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(logits, range(2)))
    assert torch.equal(found[0], found[1])
    assert (found[0] - logits_of(plain)).abs().max() <= 1e-4


def logits_of(model: Model) -> Tensor:
    runner = ModelRunner(model, 8, 16)
    with torch.inference_mode():
        return runner.forward(staged_text(runner)).logits


def staged_text(runner: ModelRunner) -> ForwardBatch:
    tokens = [5, 3, 9, 12, 0, 1, 7]
    runner.cache.tables.open(0, tokens)
    runner.cache.tables.reserve(0, len(tokens))
    return text_batch(runner, [Span(0, tokens, 0, 7)])


def test_what_cannot_be_told_to_another_process_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    for kind in ("tp", "pp"):
        with pytest.raises(InvalidRequest, match="by request are not split"):
            LLM(folder, adapters={"a": folder}, **{kind: 2})
    with pytest.raises(InvalidRequest, match="torchrun"):
        LLM(folder, drafter=NoDrafter(), tp=2)
    with pytest.raises(InvalidRequest, match="tp=1"):
        EngineConfig(tp=2, strict=True)
    with pytest.raises(InvalidRequest, match="not both"):
        EngineConfig(tp=2, pp=2)
    with pytest.raises(InvalidRequest, match="not both"):
        EngineConfig(offload=0.5, pp=2)
    with pytest.raises(InvalidRequest, match="not both"):
        EngineConfig(groups=2, pp=2)
    with pytest.raises(InvalidRequest, match="contradicts"):
        LLM(folder, config=EngineConfig(tp=3), tp=2)


@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_an_llm_starts_its_ranks_and_ends_with_them(tmp_path: Path, kind: str) -> None:
    """A request of every kind, then a rank that is killed in the middle of an answer."""
    folder = tiny_folder(tmp_path / "model")
    prompts = ["hello hello hello", "abc", "ab ab ab"]
    params = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=0.8, seed=3, n=2, logit_bias={65: 2.0}, stop=("q",)),
        SamplingParams(max_tokens=12, temperature=0.8, seed=4, grammar="root ::= [a-z]+"),
    ]
    lora = write_adapter(tmp_path / "lora", adapter_tensors(llama_modules()))
    with LLM(folder, drafter="ngram", offers=["suffix"], threads=1, lora=lora) as alone:
        want = [[c.token_ids for c in result.completions] for result in alone.generate(prompts, params)]
    with LLM(folder, drafter="ngram", offers=["suffix"], threads=1, lora=lora, **{kind: 2}) as llm:
        got = [[c.token_ids for c in result.completions] for result in llm.generate(prompts, params)]
        assert got == want
        with pytest.raises(InvalidRequest, match="one rank"):
            llm.calibrate()
        assert llm._team.followers is not None  # type: ignore[attr-defined]
        (process,) = llm._team.followers._processes  # type: ignore[attr-defined]
        ends = []
        for event in llm.stream("abc", SamplingParams(max_tokens=400, ignore_eos=True)):
            if not ends and event.token_ids:
                process.kill()
            ends.append(event.finish_reason)
        assert ends[-1] == FinishReason.ERROR
        assert llm.death is not None
        (after,) = llm.generate(["abc"])
        assert "has ended" in str(after.completions[0].error)
    assert process.returncode is not None


def test_followers_end_with_rank_0(tmp_path: Path) -> None:
    """However that ends: here at once, without a word."""
    folder = tiny_folder(tmp_path / "model")
    program = (
        "import os; from draftwood import LLM\n"
        f"llm = LLM({str(folder)!r}, tp=2, threads=1)\n"
        "print(llm._team.followers._processes[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    started = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    follower = int(started.stdout)
    for _ in range(200):
        if not Path(f"/proc/{follower}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("the follower outlives rank 0")
