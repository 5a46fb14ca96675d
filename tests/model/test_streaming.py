"""Layers that are brought to the device one at a time compute what they compute there, bit for bit."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.cli.flags import EngineFlags
from draftwood.drafters.substitute import SubstituteDrafter
from draftwood.engine.memory import plan_memory
from draftwood.errors import InvalidRequest
from draftwood.growers import Best, BestFirst, Independent, Levels
from draftwood.model import streaming
from draftwood.model.config import ModelConfig
from draftwood.model.layers import tensors_of
from draftwood.model.native_streamed import StreamedNative
from draftwood.model.runner import Model, ModelRunner, load_model
from draftwood.model.streaming import HostCopies, StreamedLayers, load_layers
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS
from draftwood.protocols import Span
from draftwood.verifiers import LAWS
from staging import text_batch
from tiny import CPU, Ask, Harness, Regime, TinyCheckpoint, generated, hf_config, no_drafter, tiny_config, tiny_folder

LAYERS = 5
ROWS = Regime(max_rows=4096, num_pages=900)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))


def checkpoint_of(family: str = "llama") -> TinyCheckpoint:
    return TinyCheckpoint(tiny_config(family, layers=LAYERS))


def runner_of(model: Model, regime: Regime = ROWS) -> ModelRunner:
    return ModelRunner(model, regime.num_pages, regime.page_size)


def logits_of(model: Model) -> Tensor:
    """Of a text, and of one token behind it: the second forward begins with what the first has left on the device."""
    runner, tokens = runner_of(model), [5, 3, 9, 12, 0, 1, 7]
    runner.cache.tables.open(0, tokens)
    runner.cache.tables.reserve(0, len(tokens))
    with torch.inference_mode():
        parts = [runner.forward(text_batch(runner, [Span(0, tokens, *span)])).logits for span in ((0, 6), (6, 7))]
    return torch.cat(parts)


def asks(temperature: float, count: int = 3) -> list[Ask]:
    return [Ask((1, 2, i), SamplingParams(temperature=temperature, seed=i, max_tokens=16)) for i in range(count)]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen2"])
@pytest.mark.parametrize("offload", [0.2, 0.6, 1.0, 4e4])
def test_the_same_bits_in_torch(family: str, offload: float) -> None:
    checkpoint = checkpoint_of(family)
    whole = Transformer(checkpoint, torch.float32, CPU)
    part = Transformer(checkpoint, torch.float32, CPU, offload=offload)
    assert isinstance(part.layers, StreamedLayers)
    assert torch.equal(logits_of(whole), logits_of(part))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen2"])
@pytest.mark.parametrize("weights", ["stored", "w4a8"])
@pytest.mark.parametrize("offload", [0.2, 0.6, 1.0, 4e4])
def test_the_same_bits_on_cpu_kernels(family: str, weights: str, offload: float) -> None:
    checkpoint, needs = checkpoint_of(family), frozenset({0, 3, LAYERS - 1})
    whole, part = (
        load_model(checkpoint, torch.float32, CPU, FORMATS[weights], offload=share) for share in (0.0, offload)
    )
    assert isinstance(part, StreamedNative)
    assert part.strict
    assert torch.equal(logits_of(whole), logits_of(part))
    assert part.num_bytes < whole.num_bytes
    found = []
    for model in (whole, part):
        runner = runner_of(model)
        runner.cache.tables.open(0, [1, 2, 3])
        runner.cache.tables.reserve(0, 3)
        found.append(runner.forward(text_batch(runner, [Span(0, [1, 2, 3], 0, 3)]), needs).features)
    assert all(torch.equal(found[0][layer], found[1][layer]) for layer in needs)


def test_the_same_bits_on_gpu_kernels() -> None:
    pytest.importorskip("triton")
    from draftwood.model.cuda import CudaTransformer

    heads = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = TinyCheckpoint(ModelConfig.from_hf(hf_config("qwen3", **heads)))
    whole, part = (CudaTransformer(checkpoint, torch.float32, device, offload=share) for share in (0.0, 0.7))
    assert torch.equal(logits_of(whole), logits_of(part))


def test_memory_is_that_of_the_resident_layers_and_two_places() -> None:
    whole = Transformer(checkpoint_of(), torch.float64, CPU)
    layer = len(streaming._taken_away(whole.layers.get(0), streaming._spilled).data)
    for away in (2, 3, 4):
        part = Transformer(checkpoint_of(), torch.float64, CPU, offload=away / LAYERS)
        assert len(part.layers.resident) == LAYERS - away
        others = part.num_bytes - sum(tensor.nbytes for tensor in tensors_of(part.layers.resident))
        resident = sum(tensor.nbytes for tensor in tensors_of(whole.layers.resident))
        assert others == whole.num_bytes - resident + 2 * layer


class Told:
    """Copies that write down when they were begun and waited for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.inner = HostCopies()

    def begin(self, place: int, source: Tensor, target: Tensor) -> None:
        self.log.append(("begin", place))
        self.inner.begin(place, source, target)

    def finish(self, place: int) -> None:
        self.log.append(("finish", place))
        self.inner.finish(place)


def test_the_next_layer_comes_while_one_is_computed() -> None:
    layers = load_layers(lambda i: torch.full((64,), float(i)), LAYERS, 0.6, CPU)
    assert isinstance(layers, StreamedLayers)
    layers.copies = told = Told()
    for _ in range(2):
        for i in range(LAYERS):
            found = layers.get(i)
            layers.prefetch(i + 1)
            assert torch.equal(found, torch.full((64,), float(i)))  # whatever is on its way
    begins = [place for what, place in told.log if what == "begin"]
    assert begins == [0, 1, 0, 1, 0, 1, 0]  # three a turn, and the first of the turn after the next
    assert told.log[:4] == [("begin", 0), ("finish", 0), ("begin", 1), ("finish", 1)]


def test_a_copy_that_fails_is_an_error_of_the_step_and_not_its_end() -> None:
    layers = load_layers(lambda i: torch.full((64,), float(i)), 2, 1.0, CPU)
    assert isinstance(layers, StreamedLayers)
    whole, layers.away = layers.away, [*layers.away]
    broken = threading.Event()

    class Broken(HostCopies):
        def finish(self, place: int) -> None:
            super().finish(place)
            if not broken.is_set():
                broken.set()
                raise OSError("the disk is gone")

    layers.copies = Broken()
    with pytest.raises(OSError, match="gone"):
        layers.get(0)
    assert float(layers.get(0)[0]) == 0.0
    assert len(whole) == 2


def test_a_full_disk_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(streaming, "spilled_memory", full)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(InvalidRequest, match=r"disk is full.*DRAFTWOOD_HOME"):
            load_model(checkpoint_of(), dtype, CPU, offload=0.5)


TREES = {
    "chosen": (Levels((3, 2, 1), Best()), "match", 0.8),
    "drawn": (Levels((2, 2), Independent()), "match", 0.8),
    "best-first": (BestFirst(nodes=40, width=6, forwards=5), "match", 0.0),
    "massive": (BestFirst(nodes=2048, width=128, forwards=4), "match", 0.8),
}

SLOW = "massive", torch.float64


@pytest.mark.parametrize(
    ("tree", "dtype"),
    [(tree, dtype) for tree in TREES for dtype in (torch.float32, torch.float64) if (tree, dtype) != SLOW],
)
def test_tokens_equal_plain_decoding_where_the_target_drafts_for_itself(tree: str, dtype: torch.dtype) -> None:
    grower, law, temperature = TREES[tree]
    wanted_asks: Sequence[Ask] = asks(temperature, 1 if tree == "massive" else 3)
    checkpoint = checkpoint_of()
    whole = runner_of(load_model(checkpoint, dtype, CPU))
    wanted = generated(Harness(whole, no_drafter(dtype), LAWS["match"](), ROWS).run(wanted_asks))
    target = runner_of(load_model(checkpoint, dtype, CPU, offload=0.6))
    drafter = SubstituteDrafter(checkpoint, FORMATS["int8"], grower)
    answers = Harness(target, drafter, LAWS[law](), ROWS).run(wanted_asks)
    assert generated(answers) == wanted
    accepted = sum(answer.accepted for answer in answers) / sum(answer.steps for answer in answers)
    assert accepted > 0.5  # eight bits say nearly the same
    if tree == "massive":
        assert max(answer.drafted / answer.steps for answer in answers) > 1000


def test_resident_layers_are_shared_and_not_copied() -> None:
    target = Transformer(checkpoint_of(), torch.float64, CPU, offload=0.6)
    part = target.substituted(checkpoint_of(), FORMATS["int4"])
    assert [part.layers.get(i) is target.layers.get(i) for i in range(LAYERS)] == [True, True, False, False, False]
    with pytest.raises(InvalidRequest, match="lower offload"):
        target.part(range(3))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_llm_with_layers_on_disk(tmp_path: Path, dtype: str) -> None:
    folder = tiny_folder(tmp_path / "model", num_hidden_layers=4)
    params = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.8, seed=3)]
    prompts = ["hello", "abc abc"]
    with LLM(folder, config=EngineConfig(cache_tokens=4096, dtype=dtype, threads=1)) as whole:
        wanted = [result.token_ids for result in whole.generate(prompts, params)]
    config = EngineConfig(cache_tokens=4096, dtype=dtype, threads=1, offload=0.5, cache_host_tokens=512)
    with LLM(folder, drafter="subspec", config=config) as llm:
        assert [result.token_ids for result in llm.generate(prompts, params)] == wanted
        assert llm.config.max_rows == 4096
        assert llm.engine.target.cache.tables.pool.tier is not None
    with pytest.raises(InvalidRequest, match="--offload"):
        LLM(folder, drafter="subspec")
    with pytest.raises(InvalidRequest, match="int4 or int8"):
        LLM(folder, drafter="subspec:weights=int3", config=config)


def test_amounts_are_shares_or_bytes() -> None:
    given = {"0": 0.0, "0.8": 0.8, "1": 1.0, "20GiB": 20 * 2**30, "1.5GB": 1.5e9, "300 MiB": 300 * 2**20}
    assert {text: EngineFlags(offload=text).config().offload for text in given} == given
    with pytest.raises(InvalidRequest, match="20GiB"):
        EngineFlags(offload="most").config()
    with pytest.raises(InvalidRequest, match="share"):
        EngineConfig(offload=-1)


def test_the_memory_plan_knows_what_is_away() -> None:
    config, free = tiny_config(layers=10), 1 << 40
    whole = plan_memory(config, None, EngineConfig(cache_tokens=64, dtype="float32"), free, free)
    away = EngineConfig(cache_tokens=64, dtype="float32", offload=0.5)
    part = plan_memory(config, None, away, free, free)
    layers = 10 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48) * 4
    assert whole.weights - part.weights == layers // 2 - 2 * layers // 10
    assert 0 < plan_memory(config, config, away, free, free).draft_weights < layers // 8
