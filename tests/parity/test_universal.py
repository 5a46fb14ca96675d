"""Families that our decoder does not know, through transformers' own modules: the same logits, the same tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftwood.batch import ForwardBatch
from draftwood.cli.about import about_table
from draftwood.config import EngineConfig
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafting import Drafter
from draftwood.engine.llm import LLM
from draftwood.engine.memory import weight_bytes
from draftwood.errors import CheckpointError, InvalidRequest
from draftwood.growers import Best, Levels
from draftwood.model import universal_rows
from draftwood.model.checkpoint import SafetensorsCheckpoint, open_checkpoint
from draftwood.model.runner import ModelRunner, Refreshable, Sliceable, require_strict
from draftwood.model.universal import ROUTES, UniversalModel
from draftwood.model.universal_attention import require_window, window_of
from draftwood.model.universal_folder import UniversalCheckpoint, UniversalConfig, require_supported
from draftwood.model.universal_rows import Step
from draftwood.model.weights import FORMATS
from draftwood.protocols import Span
from draftwood.request import SamplingParams
from draftwood.settling import settle
from draftwood.verifiers import LAWS
from no_sync import no_looking
from parity.test_families import TEXT, bushy_tree, everything_wide, paged_logits, theirs_of, wanted_logits
from staging import tree_logits
from tiny import CPU, Ask, Harness, Regime, generated, tiny_folder, tiny_runner, with_arrivals

VOCABULARY = 13
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
SHARING = {
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "head_dim": 8,
}
CALLED, MASKED, GATHERED = ROUTES
FAMILIES: dict[str, tuple[dict[str, Any], Any]] = {
    "olmo": ({}, CALLED),
    "phi": ({"partial_rotary_factor": 0.5}, CALLED),
    "olmo3": ({"sliding_window": 6}, CALLED),
    "olmoe": ({"num_experts": 4, **EXPERTS}, CALLED),
    "phimoe": ({"num_local_experts": 4, **EXPERTS}, CALLED),
    "granitemoe": ({"num_local_experts": 4, **EXPERTS}, CALLED),
    "deepseek_v3": (
        {
            **LATENT, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
            "num_key_value_heads": 4, "head_dim": 4,
        },
        CALLED,
    ),
    "llama4_text": (
        {
            "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "attention_chunk_size": 8,
            "floor_scale": 4, "attn_scale": 0.5, "no_rope_layers": [1, 0, 1], "head_dim": 8,
        },
        CALLED,
    ),
    "diffllama": ({}, CALLED),
    "gemma3n_text": (
        {
            **SHARING, "altup_num_inputs": 2, "laurel_rank": 4, "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        CALLED,
    ),
    "gemma4_text": ({**SHARING, "global_head_dim": 16}, CALLED),
    "biogpt": ({}, MASKED),
    "falcon": ({"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}, GATHERED),
    "gptj": ({**GPT, "rotary_dim": 4}, GATHERED),
}  # fmt: skip
REFUSED = {
    "mpt": ({"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 256}, "logits differ by"),
    "bloom": ({"n_layer": 3, "n_head": 4}, "logits differ by"),
    "bert": ({}, "logits differ by"),
    "gpt_neo": (
        {"num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 256},
        "cannot be seen in them",
    ),
}
PROMPTS = ((3, 5, 7, 5, 3), tuple(i * 7 % VOCABULARY for i in range(11)), tuple(i * i % VOCABULARY for i in range(17)))
NEW = 14

Made = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model of transformers and the folder it was saved to, by the name of its family; made once."""
    known: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in known:
            changes = FAMILIES[name][0] if name in FAMILIES else REFUSED[name][0]
            model, folder = theirs_of({**BASE, **changes, "model_type": name}), tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            known[name] = model, folder
        return known[name]

    return get


def runner_of(folder: Path, dtype: torch.dtype = torch.float64, num_pages: int = 200) -> ModelRunner:
    return ModelRunner.load(open_checkpoint(folder), dtype, CPU, num_pages, page_size=4)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(made: Made, name: str) -> None:
    """In float32; in float64, whatever the chunks; and of every node of a tree."""
    model, folder = made(name)
    narrow = runner_of(folder, torch.float32)
    with everything_wide():
        want = wanted_logits(model, TEXT)
        assert want.std() > 0.05, "too flat to prove anything"
        runner = runner_of(folder)
        assert isinstance(runner.model, UniversalModel)
        assert runner.model.route is FAMILIES[name][1]
        for chunk in (64, 3, 1):
            assert (paged_logits(runner, TEXT, chunk) - want).abs().max() <= 1e-9
        tree, text = bushy_tree(), TEXT[:9]
        runner.cache.tables.open(0, ())
        runner.cache.tables.reserve(0, len(text) + 8)
        got = tree_logits(runner, [Span(0, text, 0, len(text))], tree)
        for node in range(1, tree.num_nodes):
            path = [int(tree.tokens[n]) for n in tree.paths[node].tolist()[1:] if n >= 0]
            assert (got[node] - wanted_logits(model, text + path)[-1]).abs().max() <= 1e-9
    assert (paged_logits(narrow, TEXT, 64) - want).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "windows"),
    [("olmo3", {6}), ("olmoe", {None}), ("deepseek_v3", set()), ("llama4_text", {None}), ("gemma3n_text", {6, None})],
)
def test_nothing_waits_for_a_device(
    made: Made, monkeypatch: pytest.MonkeyPatch, name: str, windows: set[int | None]
) -> None:
    """A tree's rows as on a GPU, where layers are alike on our kernels for one: the same, and no value is looked at."""
    pytest.importorskip("triton")
    from draftwood.ops.cuda.attention import TreeAttention

    runner, text, tree = runner_of(made(name)[1], torch.float32), TEXT[:9], bushy_tree()
    runner.cache.tables.open(0, ())
    runner.cache.tables.reserve(0, len(text) + 8)
    plans = []
    planned = SimpleNamespace(plan=lambda *a: plans.append(a[2]) or TreeAttention.plan(*a, exact=False))
    monkeypatch.setattr(universal_rows, "DenseAttention", planned)
    want = tree_logits(runner, [Span(0, text, 0, len(text))], tree)
    assert not plans
    batches, forward = [], runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch: batches.append(batch) or forward(batch))
    tree_logits(runner, [Span(0, text, 0, len(text))], tree)
    for batch in batches:
        with no_looking():
            got = forward(batch).logits
    assert (got - want).abs().max() <= 1e-4
    assert {plan.window for plan in plans} == windows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("name", ["olmo3", "olmoe", "deepseek_v3"])
def test_forwards_are_captured_on_a_gpu(made: Made, name: str) -> None:
    device = torch.device("cuda")
    runner = ModelRunner.load(open_checkpoint(made(name)[1]), torch.float32, device, 50, page_size=16)
    runner.cache.tables.open(0, ())
    runner.cache.tables.reserve(0, 9)
    batch = runner.cache.stage_text([Span(0, TEXT, 0, 9)], torch.arange(9, device=device))
    want = runner.forward(batch).logits.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = runner.forward(batch).logits
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    assert (want.cpu() - paged_logits(runner_of(made(name)[1], torch.float32), TEXT[:9], 64)).abs().max() <= 1e-3


def test_windows_are_read_off_laws() -> None:
    laws = {
        None: lambda _b, _h, row, key: key <= row,
        6: lambda _b, _h, row, key: (key <= row) & (key > row - 6),
        "chunks": lambda _b, _h, row, key: (key <= row) & (key // 8 == row // 8),
        "given": lambda _b, _h, row, key: torch.ones(5)[key] > 0,
    }
    found = {name: window_of(universal_rows.MaskLaw(law), 200) for name, law in laws.items()}
    assert {name: window for name, (plain, window) in found.items() if plain} == {None: None, 6: 6}
    assert window_of(None, 200) == (True, None)


def asks(temperature: float) -> list[Ask]:
    return [
        Ask(prompt, SamplingParams(max_tokens=NEW, temperature=temperature, seed=i + 1))
        for i, prompt in enumerate(PROMPTS)
    ]


def answers(runner: ModelRunner, drafter: Drafter, wanted: Sequence[Ask], max_rows: int = 512) -> list[list[int]]:
    return generated(Harness(runner, drafter, LAWS["match"](), Regime(max_rows=max_rows)).run(wanted))


def generate(model: Any, prompt: Sequence[int]) -> list[int]:
    """Tokens of transformers' own loop."""
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
            eos_token_id=[12345],
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def bushy(truth: Sequence[Sequence[int]]) -> Callable[[Sequence[int]], list[list[int]]]:
    """Paths that hold the truth for a while, behind wrong siblings: keys have to move."""

    def script(tokens: Sequence[int]) -> list[list[int]]:
        for prompt, answer in zip(PROMPTS, truth, strict=True):
            if tuple(tokens[: len(prompt)]) == prompt:
                done, rng = len(tokens) - len(prompt), random.Random(len(tokens))
                right = list(answer[done : done + rng.choice([1, 2, 3, 4])])
                wrong = [[rng.randrange(VOCABULARY), rng.randrange(VOCABULARY)] for _ in range(2)]
                forks = [[*right[:i], rng.randrange(VOCABULARY)] for i in range(1, len(right))]
                return [path for path in (*wrong, right, *forks) if path]
        return []

    return script


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_generate_whatever_drafts_and_chunks(made: Made, name: str) -> None:
    model, folder = made(name)
    runner = runner_of(folder)
    with everything_wide():
        want = [generate(model, prompt) for prompt in PROMPTS]
        assert answers(runner, NoDrafter(), asks(0.0)) == want
        assert answers(runner, NoDrafter(), with_arrivals(asks(0.0), 2), max_rows=7) == want
        assert answers(runner, ScriptedDrafter(bushy(want), 16), asks(0.0)) == want
    sampled = answers(runner, NoDrafter(), asks(0.8))
    drafter = NgramDrafter(nodes=8, longest=3, shortest=1, branches=3)
    assert answers(runner, drafter, asks(0.8)) == sampled
    assert answers(runner, ScriptedDrafter(bushy(sampled), 16), asks(0.8)) == sampled


def test_it_is_preempted_and_shares_prefixes(made: Made) -> None:
    """Too few pages for all, and prompts that begin alike."""
    for name in ("deepseek_v3", "falcon"):
        folder, twice = made(name)[1], [*asks(0.8), *(replace(ask, arrives=9) for ask in asks(0.8))]
        want = answers(runner_of(folder), NoDrafter(), twice)
        few = runner_of(folder, num_pages=14)
        harness = Harness(few, NgramDrafter(nodes=4, longest=3, shortest=1), LAWS["match"]())
        found = harness.run(twice)
        assert generated(found) == want
        assert sum(answer.preemptions for answer in found) > 0
        assert sum(answer.cached_prompt_tokens for answer in found) > 0
        assert want[:3] == want[3:]


@pytest.mark.parametrize(("target", "draft"), [("olmoe", "deepseek_v3"), ("falcon", "llama4_text"), ("own", "gptj")])
def test_it_drafts(made: Made, target: str, draft: str) -> None:
    """For one of its kind and for a model of our decoder."""

    def runner() -> ModelRunner:
        return tiny_runner() if target == "own" else runner_of(made(target)[1])

    want = answers(runner(), NoDrafter(), asks(0.8))
    drafter = ModelDrafter(runner_of(made(draft)[1], num_pages=50), Levels((3, 2, 1), Best()))
    assert answers(runner(), drafter, asks(0.8)) == want


def test_a_model_that_drafts_for_itself_is_right(made: Made) -> None:
    for name in ("olmo", "gptj"):
        runner = runner_of(made(name)[1])
        drafter = ModelDrafter(runner_of(made(name)[1]), Levels((1, 1, 1), Best()))
        found = Harness(runner, drafter, LAWS["match"]()).run(asks(0.0))
        assert sum(answer.accepted for answer in found) >= 0.7 * NEW * len(PROMPTS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_exactly_is_refused(made: Made, name: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[name][1]) as refusal:
        runner_of(made(name)[1])
    assert "answers would be wrong" in str(refusal.value)
    assert "Use another model" in str(refusal.value)


@pytest.mark.parametrize("name", ["olmo3", "falcon"])
@pytest.mark.parametrize("broken", ["tree", "slots", "positions"])
def test_the_self_check_sees_what_is_wrong(made: Made, monkeypatch: pytest.MonkeyPatch, name: str, broken: str) -> None:
    """Siblings that see each other, keys of another sequence, and keys at wrong positions under a window."""
    folder = made(name)[1]
    if broken == "tree":

        def linear(batch: ForwardBatch, num_keys: int, window: int | None) -> torch.Tensor:
            own = batch.slots[:, None] * 0 + batch.visible[:, None] + (batch.ancestors > 0) * 8
            return torch.arange(num_keys) < own

        monkeypatch.setattr(universal_rows, "visible_keys", linear)
    if broken == "slots":
        monkeypatch.setattr(Step, "slots", property(lambda step: [step.batch.slots[:n] for n in step.num_keys]))
    if broken == "positions":
        monkeypatch.setattr(Step, "key_positions", property(lambda step: torch.arange(step.seen.shape[1])[None] + 3))
    with pytest.raises(CheckpointError, match="answers would be wrong"):
        runner_of(folder)


def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    causal = universal_rows.MaskLaw(lambda _b, _h, row, key: key <= row)
    sliding = universal_rows.MaskLaw(lambda _b, _h, row, key: (key <= row) & (key > row - 6))
    require_window(sliding, 6)
    require_window(causal, None)
    for mask, window in ((causal, 6), (sliding, 5), (None, 6)):
        with pytest.raises(CheckpointError, match=f"window of {window}"):
            require_window(mask, window)


def test_a_model_with_recurrent_layers_is_refused_before_it_is_read(tmp_path: Path) -> None:
    config = AutoConfig.for_model("recurrent_gemma", **BASE)
    config.save_pretrained(tmp_path)
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"recurrent.*cannot give it back.*whose layers all attend"):
        open_checkpoint(tmp_path)


def test_what_computes_a_model(made: Made, tmp_path: Path) -> None:
    """Our decoder where it knows the family, unless the other is asked for; never where nobody knows it."""
    ours, foreign = tiny_folder(tmp_path / "ours"), made("olmo")[1]
    assert isinstance(open_checkpoint(ours), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(ours, "transformers"), UniversalCheckpoint)
    assert isinstance(open_checkpoint(foreign), UniversalCheckpoint)
    with pytest.raises(CheckpointError, match="architecture is 'olmo'"):
        open_checkpoint(foreign, "own")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobodys", "auto_map": {"AutoConfig": "x.Y"}}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"architecture is 'nobodys'.*does not know it either"):
        open_checkpoint(tmp_path)
    with pytest.raises(InvalidRequest, match="Unknown impl 'theirs'"):
        EngineConfig(impl="theirs")


def test_the_same_model_in_both_implementations(tmp_path: Path) -> None:
    """Through the whole engine, texts and all, plain and drafted."""
    folder = str(tiny_folder(tmp_path))
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    texts = set()
    for impl, drafter in (("own", "none"), ("transformers", "ngram"), ("transformers", f"model:{folder}")):
        with LLM(folder, drafter=drafter, config=EngineConfig(impl=impl, dtype="float64", cache_tokens=512)) as llm:
            texts.add(llm.generate("one two one two", params).text)
    assert len(texts) == 1


def paged_with_features(runner: ModelRunner) -> None:
    runner.cache.tables.open(0, ())
    runner.cache.tables.reserve(0, 3)
    runner.forward(runner.cache.stage_text([Span(0, [1, 2, 3], 0, 3)]), frozenset({0}))


def test_what_was_not_shown_to_be_exact_is_refused(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made("olmo")[1]
    checkpoint = open_checkpoint(folder)
    for dtype, weights, reason in (
        (torch.bfloat16, "stored", "dtype='float32'"),
        (torch.float32, "int8", "leave weights alone"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            ModelRunner.load(checkpoint, dtype, CPU, 10, 4, FORMATS[weights])
    with pytest.raises(InvalidRequest, match="device='cpu'"):
        require_supported("it", torch.float32, torch.device("cuda"), FORMATS["stored"], encoder=True)
    with pytest.raises(CheckpointError, match="ngram or model:NAME"):
        checkpoint.tensor("model.norm.weight")
    model = runner_of(folder).model
    assert not isinstance(model, Sliceable | Refreshable)
    assert isinstance(tiny_runner().model, Sliceable)
    assert isinstance(tiny_runner().model, Refreshable)
    with pytest.raises(InvalidRequest, match="transformers' own modules"):
        require_strict(model)
    with pytest.raises(InvalidRequest, match="no features"):
        paged_with_features(runner_of(folder))
    assert settle(EngineConfig(device="cpu"), checkpoint, "none").cache_tokens
    with pytest.raises(InvalidRequest, match="float32"):
        settle(EngineConfig(device="cpu", dtype="bfloat16"), checkpoint, "none")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    with pytest.raises(CheckpointError, match=r"here is 4.57.1: pip install 'draftwood\[universal\]'"):
        open_checkpoint(folder)
    monkeypatch.undo()

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(CheckpointError, match=r"not installed: pip install 'draftwood\[universal\]'"):
        open_checkpoint(folder)


def test_files_that_do_not_fit_are_refused(made: Made, tmp_path: Path) -> None:
    source = made("olmo")[1]
    stated = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    (tmp_path / "config.json").write_text(json.dumps(stated))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no model.layers.1.mlp.up_proj.weight that fits"):
        runner_of(tmp_path)
    for changes, reason in (
        ({"quantization_config": {"quant_method": "x"}}, "quantised"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "transformers refuses its config.json"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**stated, **changes}))
        with pytest.raises(CheckpointError, match=reason):
            open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(stated))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapter"):
        open_checkpoint(tmp_path)


def test_positions_that_would_depend_on_the_batch_are_not_used(made: Made, tmp_path: Path) -> None:
    stated = json.loads((made("phimoe")[1] / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**stated, "model_type": "olmo", "rope_parameters": rope}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config.max_positions == 64


def test_models_says_what_runs_it(made: Made) -> None:
    console = Console(record=True, width=160)
    console.print(about_table(str(made("deepseek_v3")[1])))
    text = console.export_text()
    assert "deepseek_v3" in text
    assert "transformers' own modules with our pages and masks" in text
    assert "the same, in float32" in text
    config = open_checkpoint(made("deepseek_v3")[1]).config
    assert isinstance(config, UniversalConfig)
    assert weight_bytes(config, "stored", torch.float32) == 4 * config.parameters
    assert config.parameters == sum(weight.numel() for weight in made("deepseek_v3")[0].state_dict().values())
