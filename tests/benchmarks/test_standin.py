"""The stand-in of the GPU benchmark: the same function in another shape, in files that everybody reads."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.model.checkpoint import Checkpoint, expected_shape, open_checkpoint
from draftwood.nets.dflash import BlockNet, BlockSpec, Confidence, Markov
from draftwood.nets.eagle import Eagle3, Eagle3Spec
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.export import export
from draftwood.nets.layouts import build_net, open_drafter
from draftwood.nets.parts import DraftHead
from draftwood.train.attention import Blocks, Causal
from reference_model import written_out_logits
from tiny import tensor_names, tiny_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import standin
import standin_check
import standin_drafter
from gpu_prompts import CHAT8, STRICT64, chats

CPU = torch.device("cpu")
SHAPE = standin.Shape(layers=3, hidden=128, heads=16, kv_heads=4, head_dim=32, inner=96, positions=600)
TEXT = [1, 5, 9, 200, 77, 5, 9, 31, 256, 0, 12]
SHARES = {"one copy": (32, (0.5,), 1), "two copies": (36, (0.5, 0.25), 2)}


def both(folder: Path, hidden: int, shape: standin.Shape = SHAPE, **changes: Any) -> tuple[Checkpoint, Checkpoint]:
    """A tiny model as everybody sees it, in bfloat16, and its stand-in."""
    tiny = open_checkpoint(tiny_folder(folder / "tiny", hidden_size=hidden, head_dim=8, **changes))
    standin.build_small(tiny, folder / "small")
    standin.build(tiny, folder / "large", shape, CPU)
    return open_checkpoint(folder / "small"), open_checkpoint(folder / "large")


@pytest.mark.parametrize(("hidden", "shares", "copies"), SHARES.values(), ids=SHARES.keys())
@pytest.mark.parametrize("tied", [False, True])
def test_the_function_is_the_same(
    tmp_path: Path, hidden: int, shares: tuple[float, ...], copies: int, tied: bool
) -> None:
    small, large = both(tmp_path, hidden, tie_word_embeddings=tied)
    lies = standin.Stream.within(hidden, SHAPE.hidden)
    assert (lies.shares, lies.copies) == (shares, copies)
    assert large.config.norm_eps == pytest.approx(small.config.norm_eps * sum(shares) ** 2)
    # Shares are powers of two and so is the root of four: nothing is rounded, whatever the sizes are.
    torch.testing.assert_close(written_out_logits(large, TEXT), written_out_logits(small, TEXT), rtol=1e-6, atol=1e-6)


def own_net(kind: str, words: TargetEmbeddings) -> torch.nn.Module:
    config = words.config
    layers = {"eagle3": 1, "block": 2}[kind]
    stack = replace(config, num_layers=layers, windows=(None,) * layers)
    tokens = torch.arange(0, config.vocab_size, 3)
    head = DraftHead(words.head(tokens), tokens, config.vocab_size, own=False)
    if kind == "eagle3":
        return Eagle3(stack, Eagle3Spec((0, 1), config.hidden_size, True, True, True), head)
    markov = Markov(config.vocab_size, len(tokens), 4)
    return BlockNet(stack, BlockSpec((0, 1), config.hidden_size, 4, None), head, markov, Confidence(36, markov))


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_widened_drafter_says_the_same(tmp_path: Path, kind: str) -> None:
    """The same logits from the stand-in's stream as the small network gives from the small one's."""
    small, large = both(tmp_path, 36)
    words = TargetEmbeddings(small, CPU, torch.float32)
    torch.manual_seed(0)
    net = own_net(kind, words)
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    export(net, tmp_path / "drafter", "tiny", {}, dtype=torch.float32)
    standin_drafter.widen(tmp_path / "drafter", small, large, tmp_path / "wide", CPU, torch.float32)
    features = torch.randn(len(TEXT), 2, 36)
    copied = torch.nn.functional.pad(features.repeat(1, 1, 2), (0, SHAPE.hidden - 72))
    got = []
    for path, target, given in (("drafter", small, features), ("wide", large, copied)):
        own = TargetEmbeddings(target, CPU, torch.float32)
        built = build_net(open_drafter(tmp_path / path), target.config, own)
        got.append(_said(built, own, given.flatten(1)))
    torch.testing.assert_close(got[1], got[0], rtol=1e-3, atol=3e-4)


@torch.no_grad()
def _said(net: Any, words: TargetEmbeddings, features: torch.Tensor) -> torch.Tensor:
    """Logits after each token of TEXT, or of the block behind it."""
    tokens, positions = torch.tensor([TEXT]), torch.arange(len(TEXT))[None]
    mask = torch.ones(1, len(TEXT), len(TEXT), dtype=torch.bool).tril()
    if isinstance(net, Eagle3):
        output = net.run(words.embed(tokens), net.fuse(features[None]), positions, Causal(mask))
        output = net.run(
            words.embed(tokens), output, positions + 1, Causal(mask)
        )  # its own output passes for a feature
        return net.logits(output)
    context = net.context(features[None])
    known = [net.keys_values(i, context, positions) for i in range(net.config.num_layers)]
    before = torch.ones(1, 1, len(TEXT), dtype=torch.bool)
    embedded = torch.cat([words.embed(tokens[:, :1]), net.mask_embedding.expand(1, 3, -1)], 1)
    output = net.run(embedded, torch.arange(11, 15)[None], Blocks(known, before, 4))
    sure = net.confidence_head(output, tokens[:, :4])[..., None]
    return torch.cat([net.corrected(output, net.head(output), tokens[:, :4], output), sure], -1)


def test_nothing_compresses(tmp_path: Path) -> None:
    """Weights are random wherever they may be: few zeros, no equal rows, and no larger than the real ones."""
    small, large = both(tmp_path, 32)
    for name in tensor_names(large.config):
        weight = large.tensor(name).float()
        assert weight.shape == expected_shape(name, large.config)
        if weight.dim() == 2 and name != standin.EMBEDDING:
            assert float((weight == 0).float().mean()) < 0.5, name
            assert len(weight.unique(dim=0)) == len(weight), name
    own, new = (m.tensor("model.layers.1.mlp.gate_proj.weight").float().std() for m in (small, large))
    assert float(new / own) == pytest.approx(1, rel=0.05)


def test_shards_hold_what_the_index_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "SHARD_BYTES", 60_000)
    _, large = both(tmp_path, 32)
    files = sorted((tmp_path / "large").glob("*.safetensors"))
    assert len(files) > 3
    assert all(large.has(name) for name in tensor_names(large.config))


def test_engines_and_tokenizers_read_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    both(tmp_path, 36)
    config = EngineConfig(cache_tokens=1024, device="cpu")
    answers = []
    for name in ("small", "large"):
        with LLM(tmp_path / name, config=config) as llm:
            answers.append(llm.generate([TEXT], SamplingParams(max_tokens=24, ignore_eos=True))[0].token_ids)
            ids = llm.tokenizer.encode("Is the sky blue? 42 times!")
        theirs = AutoTokenizer.from_pretrained(tmp_path / name, trust_remote_code=False)
        assert theirs.encode("Is the sky blue? 42 times!", add_special_tokens=False) == ids
    assert answers[0] == answers[1]
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "large", dtype=torch.float32, trust_remote_code=False
    ).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([TEXT])).logits[0]
    wanted = written_out_logits(open_checkpoint(tmp_path / "small"), TEXT)
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-3, atol=1e-3)


def test_the_check_sees_a_difference(tmp_path: Path) -> None:
    small, large = both(tmp_path, 36)
    texts = [TEXT, TEXT[::-1], list(range(0, 250, 7))]
    assert standin_check.agreement(small, large, texts, torch.float32, CPU) == 1
    other = open_checkpoint(tiny_folder(tmp_path / "other", hidden_size=36, head_dim=8, noise=0.5))
    assert standin_check.agreement(other, large, texts, torch.float32, CPU) < 0.9


@pytest.mark.parametrize(
    "changes", [{"layers": 1}, {"hidden": 16}, {"heads": 4}, {"heads": 10}, {"head_dim": 12}, {"inner": 8}]
)
def test_a_shape_that_is_too_small_is_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    tiny = open_checkpoint(tiny_folder(tmp_path / "tiny", head_dim=8))
    with pytest.raises(SystemExit, match="cannot be put into this shape"):
        standin.StandIn(tiny, standin.Shape(**{**vars(SHAPE), **changes}), CPU)


def test_prompts_differ_before_a_page_is_full() -> None:
    tokenizer = open_checkpoint("smollm2").tokenizer()
    prompts = chats(tokenizer, CHAT8, 24)
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 24
    assert len(set(STRICT64)) == 64


@pytest.mark.slow
def test_smollm2_keeps_its_likeliest_tokens(tmp_path: Path) -> None:
    source = open_checkpoint("smollm2")
    shape = standin.Shape(layers=31, hidden=1152, heads=12, kv_heads=3, inner=1536)
    standin.build_small(source, tmp_path / "small")
    standin.build(source, tmp_path / "large", shape, CPU)
    small, large = open_checkpoint(tmp_path / "small"), open_checkpoint(tmp_path / "large")
    assert large.tokenizer().fingerprint == source.tokenizer().fingerprint
    ours, theirs = (Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("small", "large"))
    assert all(ours.encode(text).ids == theirs.encode(text).ids == source.tokenizer().encode(text) for text in CHAT8)
    texts = chats(source.tokenizer(), CHAT8[:3], 3)
    share = standin_check.agreement(small, large, texts, torch.float32, CPU)
    assert share >= 1 - 1 / sum(map(len, texts))  # queries are rounded once more: one near tie may fall the other way
