"""Drafters written for other engines: the names and shapes those read, and the same guesses through our own loader."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.engine.controller import FixedBudget
from draftwood.engine.llm import LLM
from draftwood.errors import CheckpointError, IncompatibleParts, InvalidRequest
from draftwood.model.checkpoint import open_checkpoint
from draftwood.nets.dflash import BlockNet, BlockSpec, Confidence, HiddenCorrection, Markov
from draftwood.nets.eagle import Eagle1, Eagle3, Eagle3Spec, MultiToken
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.exchange import Destination, Target, export_for
from draftwood.nets.export import export
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.layouts import Layout, build_net, open_drafter, recognise, self_test
from draftwood.nets.layouts.alone import read_net
from draftwood.nets.medusa import HeadStack
from draftwood.nets.pard import Ahead, ParallelEagle
from draftwood.nets.parts import DraftHead, LowRankHead
from draftwood.nets.student import MaskedStudent, Student
from draftwood.request import SamplingParams
from nets.published import HEAD, TARGET, WORDS, random
from nets.test_export import DRAFT, ONE, eagle3, outputs, own_head, randomised, shared_head
from tiny import tiny_folder

NORMED = dataclasses.replace(ONE, qk_norm=True)
LAST = TARGET.num_layers - 1
FOR = Target("org/target", WORDS)
VLLM, SGLANG, SPECULATORS = Destination.VLLM, Destination.SGLANG, Destination.SPECULATORS


def whole_head() -> DraftHead:
    return DraftHead(WORDS.head(), None, 13, own=False)


def block(
    head: DraftHead, mask: int | None, *, rank: int = 0, anchor: bool = False, confident: bool = False
) -> BlockNet:
    table = Markov(13, head.size, rank) if rank else None
    sure = Confidence(32, table) if confident else None
    return BlockNet(NORMED, BlockSpec((1, 2), 32, 4, mask, anchor), head, table, sure)


def peagle() -> ParallelEagle:
    return ParallelEagle(ONE, Eagle3Spec((1, 2), 32, fc_norm=True), own_head(), Ahead(5, 3), embedding=random(13, 32))


NETS: dict[str, tuple[Destination, Callable[[], nn.Module], Layout]] = {
    "eagle3, the target's head, vllm": (VLLM, lambda: eagle3(shared_head(), fc_norm=True), Layout.SPECULATORS_EAGLE3),
    "eagle3, its own head, vllm": (VLLM, lambda: eagle3(own_head()), Layout.SPECULATORS_EAGLE3),
    "eagle3, a narrow head, vllm": (VLLM, lambda: eagle3(LowRankHead(32, 4, 13)), Layout.SPECULATORS_EAGLE3),
    "eagle3, speculators": (SPECULATORS, lambda: eagle3(shared_head(), norm_output=True), Layout.SPECULATORS_EAGLE3),
    "eagle3, qwen3, vllm": (VLLM, lambda: Eagle3(NORMED, Eagle3Spec((1,), 32), own_head()), Layout.SPECULATORS_EAGLE3),
    "eagle3, sglang": (SGLANG, lambda: eagle3(shared_head(), norm_before_fc=True), Layout.MODELOPT_EAGLE3),
    "peagle, vllm": (VLLM, peagle, Layout.SPECULATORS_PEAGLE),
    "peagle, speculators": (SPECULATORS, peagle, Layout.SPECULATORS_PEAGLE),
    "eagle1, vllm": (VLLM, lambda: Eagle1(ONE, LAST, whole_head(), bias=False), Layout.EAGLE1),
    "eagle1, sglang": (SGLANG, lambda: Eagle1(ONE, LAST, whole_head(), bias=False), Layout.EAGLE1),
    "mtp, speculators": (SPECULATORS, lambda: MultiToken(ONE, LAST, whole_head()), Layout.SPECULATORS_MTP),
    "dflash, vllm": (VLLM, lambda: block(shared_head(), 12), Layout.SPECULATORS_BLOCK),
    "dflash, a mask of its own, vllm": (VLLM, lambda: block(shared_head(), None), Layout.SPECULATORS_BLOCK),
    "dspark, a mask of its own, vllm": (
        VLLM, lambda: block(own_head(), None, rank=3, anchor=True, confident=True), Layout.SPECULATORS_BLOCK,
    ),
    "dspark, speculators": (SPECULATORS, lambda: block(own_head(), 12, rank=3, anchor=True), Layout.SPECULATORS_BLOCK),
    "dflash, sglang": (SGLANG, lambda: block(whole_head(), 12), Layout.ZLAB_BLOCK),
    "dspark, sglang": (SGLANG, lambda: block(whole_head(), 12, rank=3, anchor=True, confident=True), Layout.ZLAB_BLOCK),
    "medusa, the target's head, vllm": (
        VLLM, lambda: HeadStack(32, LAST, 1, [shared_head()] * 3, grounded=False), Layout.MEDUSA_VLLM,
    ),
    "medusa, own heads, vllm": (
        VLLM, lambda: HeadStack(32, LAST, 2, [own_head(), own_head()], grounded=False), Layout.MEDUSA_VLLM,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NETS)
def test_what_is_written_guesses_the_same_through_our_loader(tmp_path: Path, kind: str) -> None:
    destination, make, layout = NETS[kind]
    net = randomised(make())
    done = export_for(destination, net, tmp_path, FOR, dtype=torch.float32)
    files = open_drafter(tmp_path)
    assert recognise(files) == layout
    loaded = build_net(files, TARGET, WORDS)
    self_test(loaded, WORDS)
    assert loaded.reads == net.reads  # type: ignore[union-attr]
    expected, found = outputs(net), outputs(loaded)
    for what in expected:
        torch.testing.assert_close(found[what], expected[what], rtol=1e-5, atol=1e-5)
    assert str(tmp_path) in done.usage


LAYER = {
    "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight", *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
}  # fmt: skip


def exported(folder: Path, destination: Destination, net: nn.Module) -> tuple[dict, dict[str, Tensor]]:
    export_for(destination, randomised(net), folder, FOR, dtype=torch.float32)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_eagle3_has_what_vllm_would_leave_empty(tmp_path: Path) -> None:
    """The head's rows, and the number of features, which vLLM takes to be three."""
    config, tensors = exported(tmp_path, VLLM, eagle3(shared_head(), fc_norm=True))
    layer = {f"layers.0.{name}" for name in LAYER} | {"layers.0.hidden_norm.weight"}
    norms = {"norm.weight", "fc_norm.0.weight", "fc_norm.1.weight"}
    assert tensors.keys() == {"fc.weight", "lm_head.weight", "d2t", "t2d", *layer, *norms}
    assert torch.equal(tensors["lm_head.weight"], HEAD[DRAFT].float())
    assert (tensors["d2t"] + torch.arange(5)).tolist() == DRAFT.tolist()
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 2
    assert (config["speculators_model_type"], config["draft_vocab_size"]) == ("eagle3", 5)


def test_eagle3_as_sglang_reads_it(tmp_path: Path) -> None:
    config, tensors = exported(tmp_path, SGLANG, eagle3(shared_head()))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]  # outputs, where vLLM counts inputs
    assert (config["hidden_size"], config["draft_vocab_size"], config["tie_word_embeddings"]) == (32, 5, False)
    assert {"d2t", "fc.weight", "norm.weight", "lm_head.weight", "layers.0.hidden_norm.weight"} <= tensors.keys()


def test_a_mask_of_its_own_becomes_a_row_of_the_embedding(tmp_path: Path) -> None:
    net = randomised(block(shared_head(), None))
    for mask, folder in ((None, "last"), (7, "seventh")):
        export_for(VLLM, net, tmp_path / folder, dataclasses.replace(FOR, mask_token=mask), dtype=torch.float32)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        tensors = load_file(tmp_path / folder / "model.safetensors")
        row = 12 if mask is None else mask
        assert config["mask_token_id"] == row
        assert config["sliding_window_non_causal"]  # or vLLM makes attention in a block causal
        assert torch.equal(tensors["embed_tokens.weight"][row], net.mask_embedding)
        others = [token for token in range(13) if token != row]
        assert torch.equal(tensors["embed_tokens.weight"][others], WORDS.embed(torch.tensor(others)))
    with pytest.raises(InvalidRequest, match="the target has 13 tokens"):
        export_for(VLLM, net, tmp_path / "outside", dataclasses.replace(FOR, mask_token=13))


def test_another_embedding_than_the_targets_is_refused_still(tmp_path: Path) -> None:
    export_for(VLLM, randomised(block(shared_head(), None)), tmp_path, FOR, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"][3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(IncompatibleParts, match="an embedding of its own"):
        build_net(open_drafter(tmp_path), TARGET, WORDS)


def test_medusa_has_heads_for_vllm(tmp_path: Path) -> None:
    config, tensors = exported(tmp_path, VLLM, HeadStack(32, LAST, 1, [shared_head()] * 2, grounded=False))
    assert config["original_lm_head"]  # one matrix for both
    assert torch.equal(tensors["lm_heads.0.weight"], HEAD[DRAFT].float())
    assert tensors.keys() == {"token_map", "lm_heads.0.weight"} | {
        f"blocks.{head}.layers.0.{part}" for head in range(2) for part in ("weight", "bias")
    }


def test_eagle1_has_the_bias_that_sglang_would_draw(tmp_path: Path) -> None:
    _, tensors = exported(tmp_path, SGLANG, Eagle1(ONE, LAST, whole_head(), bias=False))
    assert not tensors["fc.bias"].any()


REFUSED = {
    "residual": (SGLANG, lambda: eagle3(own_head(), norm_before_residual=True), "norm_before_residual"),
    "last layer": (SGLANG, lambda: Eagle3(ONE, Eagle3Spec((1, LAST), 32), own_head()), "the last layer"),
    "head bias": (VLLM, lambda: eagle3(own_head(bias=True)), "head has a bias"),
    "own head": (VLLM, lambda: Eagle1(ONE, LAST, own_head(), bias=False), "head is its own"),
    "bias": (VLLM, lambda: Eagle1(ONE, LAST, whole_head(), bias=True), "input projection has a bias"),
    "peagle": (SGLANG, peagle, "no such drafters"),
    "mtp": (VLLM, lambda: MultiToken(ONE, LAST, whole_head()), "target's own files"),
    "no norms": (VLLM, lambda: BlockNet(ONE, BlockSpec((1,), 32, 4, 5), shared_head()), "norm queries and keys"),
    "own mask": (SGLANG, lambda: block(whole_head(), None), "mask is an embedding"),
    "part": (SGLANG, lambda: block(shared_head(), 12), "a part of the vocabulary"),
    "anchor": (SGLANG, lambda: block(whole_head(), 12, rank=3), "guesses from the anchor"),
    "hydra": (VLLM, lambda: HeadStack(32, LAST, 1, [own_head()] * 2, grounded=True), "Hydra"),
    "medusa": (SGLANG, lambda: HeadStack(32, LAST, 1, [own_head()] * 2, grounded=False), "no such heads"),
    "kangaroo": (VLLM, lambda: Kangaroo(ONE, 2, own_head()), "leave the target early"),
    "student": (SPECULATORS, lambda: Student(TARGET), "language model"),
    "masked student": (SGLANG, lambda: MaskedStudent(TARGET, 12, 3), "behind masks"),
    "treeflash": (
        VLLM,
        lambda: BlockNet(NORMED, BlockSpec((1,), 32, 4, 5), shared_head(), HiddenCorrection(NORMED, shared_head(), 8)),
        "TreeFlash",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_an_engine_computes_differently_is_refused(tmp_path: Path, kind: str) -> None:
    destination, make, why = REFUSED[kind]
    with pytest.raises(InvalidRequest, match=why):
        export_for(destination, randomised(make()), tmp_path / "out", FOR)
    assert not (tmp_path / "out").exists()


def answer(model: Path, drafter: Path) -> tuple[list[int], int, int]:
    prefix = "model:" if (drafter / "tokenizer.json").exists() else ""
    with LLM(str(model), drafter=prefix + str(drafter), controller=FixedBudget(4)) as llm:
        (result,) = llm.generate(["the cat"], SamplingParams(max_tokens=24))
    done = result.completions[0]
    return done.token_ids, done.stats.drafted, done.stats.accepted


@pytest.mark.parametrize("kind", ["eagle3", "student"])
def test_the_command_writes_a_drafter_that_drafts_the_same(tmp_path: Path, kind: str) -> None:
    model = tiny_folder(tmp_path / "target")
    target = open_checkpoint(model)
    words = TargetEmbeddings(target, torch.device("cpu"), torch.float32)
    one = dataclasses.replace(target.config, num_layers=1, windows=(None,))
    net = Student(one) if kind == "student" else Eagle3(
        one, Eagle3Spec((0, 1), one.hidden_size), DraftHead(words.head(), None, one.vocab_size, own=False)
    )  # fmt: skip
    export(randomised(net), tmp_path / "ours", "target", {}, dtype=torch.float32)
    command = ["export", str(tmp_path / "ours"), "--model", str(model), "--dtype", "float32"]
    result = CliRunner().invoke(app, [*command, "--for", "vllm", "--out", str(tmp_path / "theirs")])
    assert result.exit_code == 0, result.stderr
    assert "vllm serve" in result.stderr
    assert answer(model, tmp_path / "theirs") == answer(model, tmp_path / "ours")
    for wrong, why in ((["--for", "tgi"], "choose one of"), (["--for", "vllm", "--dtype", "int8"], "Unknown dtype")):
        refused = CliRunner().invoke(app, [*command, *wrong, "--out", str(tmp_path / "x")])
        assert refused.exit_code == 1
        assert why in " ".join(refused.stderr.split())


def test_a_language_model_is_not_exported(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    with pytest.raises(CheckpointError, match="load as it is"):
        read_net(open_drafter(model), open_checkpoint(model))
