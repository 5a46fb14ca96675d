"""DFlash, DSpark and TreeFlash in every spelling: context, block, correction and confidence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwood.nets.dflash import Markov
from draftwood.nets.layouts import Layout, open_drafter, recognise
from nets.published import (
    EMBEDDING,
    HEAD,
    HIDDEN,
    INNER,
    LAYERS,
    VOCABULARY,
    decoder,
    layer_config,
    layer_tensors,
    linear,
    load,
    plain_attend,
    random,
    rms,
    same,
    silu,
    write,
)

SIZE, MASK, SEEN = 4, 11, 6  # rows of a block, the mask, and positions of the target before it
BLOCK = torch.tensor([5, MASK, MASK, MASK])
BEFORE = torch.tensor([5, 2, 9, 0])
EVERYTHING = torch.ones(SIZE, SEEN + SIZE).bool()
DRAFT = torch.tensor([1, 4, 5, 9, 10])


def block_tensors(layers: int = 2, reads: int = 2) -> dict[str, Tensor]:
    raw = {
        "fc.weight": random(HIDDEN, reads * HIDDEN),
        "hidden_norm.weight": random(HIDDEN, seed=5),
        "norm.weight": random(HIDDEN, seed=6),
    }
    for i in range(layers):
        raw |= layer_tensors(f"layers.{i}.", seed=10 * i, qk_norm=True)
    return raw


def zlab(layers: int = 2, **inner: object) -> dict[str, object]:
    return {
        **layer_config(layers, "qwen3"),
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": SIZE,
        "num_target_layers": LAYERS,
        "layer_types": ["full_attention"] * layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 5], **inner},
    }


def speculators(kind: str = "dflash", **changes: object) -> dict[str, object]:
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": layer_config(2, "qwen3"),
        "draft_vocab_size": VOCABULARY,
        "block_size": SIZE,
        "aux_hidden_state_layer_ids": [2, 6],
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        **changes,
    }


def features() -> Tensor:
    return random(SEEN, 2 * HIDDEN, seed=20).double() * 4


def block_by_hand(raw, embedded: Tensor | None = None, p: str = "") -> Tensor:
    """Outputs of the block's rows before the last norm."""
    context = rms(linear(features(), raw[f"{p}fc.weight"]), raw[f"{p}hidden_norm.weight"])
    x = EMBEDDING[BLOCK] if embedded is None else embedded
    for i in range(2):
        layer = f"{p}layers.{i}."
        x = decoder(raw, layer, x, torch.arange(SEEN, SEEN + SIZE), EVERYTHING, context=context)
    return x


def by_net(net) -> Tensor:
    context = net.context(features().float())
    embedded = EMBEDDING[BLOCK].float()
    if net.mask_embedding is not None:
        embedded[1:] = net.mask_embedding

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        known = net.keys_values(layer, context, torch.arange(SEEN))
        return plain_attend(query, torch.cat([known[0], key]), torch.cat([known[1], value]), EVERYTHING)

    return net.run(embedded, torch.arange(SEEN, SEEN + SIZE), attend)


def corrected(net, output: Tensor) -> Tensor:
    return net.corrected(output, net.head(output), BEFORE, EMBEDDING[BEFORE].float())


@pytest.mark.parametrize("kind", ["zlab", "zlab-nested", "zlab-default", "speculators"])
def test_dflash(tmp_path: Path, kind: str) -> None:
    raw, config = block_tensors(), zlab()
    if kind == "zlab-nested":
        del config["block_size"]
        config = {**config, "dflash_config": {"block_size": SIZE, "mask_token_id": MASK, "target_layer_ids": [1, 5]}}
    if kind == "zlab-default":
        config["dflash_config"] = {"mask_token_id": MASK}
    if kind == "speculators":
        config = speculators()
    folder = write(tmp_path, config, raw)
    assert recognise(open_drafter(folder)) is (Layout.SPECULATORS_BLOCK if kind == "speculators" else Layout.ZLAB_BLOCK)
    net = load(folder)
    assert (net.reads, net.spec.mask_token, net.spec.guesses) == ((1, 5), MASK, SIZE - 1)
    output = by_net(net)
    expected = rms(block_by_hand(raw), raw["norm.weight"])
    same(output, expected)
    same(corrected(net, output), linear(expected, HEAD))
    assert not net.head.own


def dspark_tensors(rows: int = VOCABULARY, wide: bool = True) -> dict[str, Tensor]:
    return {
        **block_tensors(),
        "markov_head.markov_w1.weight": random(VOCABULARY, 3, seed=60) * 3,
        "markov_head.markov_w2.weight": random(rows, 3, seed=61) * 3,
        "confidence_head.proj.weight": random(1, HIDDEN + 3 if wide else HIDDEN, seed=62),
        "confidence_head.proj.bias": random(1, seed=63),
    }


def check_dspark(net, raw, head: Tensor, wide: bool = True) -> None:
    output, expected = by_net(net), rms(block_by_hand(raw), raw["norm.weight"])
    same(output, expected)
    table = raw["markov_head.markov_w1.weight"].double()[BEFORE]
    same(corrected(net, output), linear(expected, head) + linear(table, raw["markov_head.markov_w2.weight"]))
    known = torch.cat([expected, table], -1) if wide else expected
    sure = linear(known, raw["confidence_head.proj.weight"], raw["confidence_head.proj.bias"])[:, 0]
    same(net.confidence_head(output, BEFORE), sure)
    assert net.spec.guesses == SIZE


@pytest.mark.parametrize("wide", [True, False])
def test_speculators_dspark_with_a_smaller_vocabulary(tmp_path: Path, wide: bool) -> None:
    raw = dspark_tensors(len(DRAFT), wide)
    mask = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, DRAFT, True)
    vocabulary = {"d2t": DRAFT - torch.arange(len(DRAFT)), "t2d": mask, "lm_head.weight": HEAD[DRAFT].float() * 2}
    heads = {"markov_rank": 3, "markov_head_type": "vanilla", "confidence_head_with_markov": wide}
    config = speculators("dspark", draft_vocab_size=len(DRAFT), enable_confidence_head=True, **heads)
    net = load(write(tmp_path, config, {**raw, **vocabulary}))
    check_dspark(net, raw, HEAD[DRAFT] * 2, wide)
    assert net.head.own
    assert net.head.tokens.tolist() == DRAFT.tolist()


def test_zlab_dspark_under_modelopts_name_for_confidence(tmp_path: Path) -> None:
    raw = dspark_tensors()
    renamed = {name.replace("confidence_head.proj", "confidence_proj"): part for name, part in raw.items()}
    check_dspark(load(write(tmp_path, zlab(), renamed)), raw, HEAD)


@pytest.mark.parametrize("rank", [3, 0])
def test_deepspec(tmp_path: Path, rank: int) -> None:
    """It writes copies of the target's embedding and head, and its DFlash guesses from the anchor too."""
    raw = dspark_tensors() if rank else block_tensors()
    config = {
        **layer_config(2, "qwen3"),
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [1, 5],
        "mask_token_id": MASK,
        "block_size": SIZE,
        "num_anchors": 512,
        "markov_rank": rank,
        "enable_confidence_head": bool(rank),
        **({"markov_head_type": "vanilla", "confidence_head_with_markov": True} if rank else {}),
    }
    copies = {"embed_tokens.weight": EMBEDDING.float(), "lm_head.weight": HEAD.float()}
    net = load(write(tmp_path, config, {**raw, **copies}))
    assert net.spec.guesses == SIZE
    if rank:
        check_dspark(net, raw, HEAD)
    else:
        same(by_net(net), rms(block_by_hand(raw), raw["norm.weight"]))


def test_treeflash(tmp_path: Path) -> None:
    """Its correction is added before the last norm, which is applied once more."""
    backbone = {f"model.{name}": part for name, part in block_tensors().items()}
    raw = {
        **backbone,
        "ar_approximation.ug.weight": random(2 * INNER, 2 * HIDDEN, seed=70),
        "ar_approximation.ug.bias": random(2 * INNER, seed=71),
        "ar_approximation.d.weight": random(HIDDEN, INNER, seed=72) * 3,
        "ar_approximation.norm.weight": random(HIDDEN, seed=73),
    }
    config = {**zlab(), "treeflash_config": {"ar_approximation": "swiglu", "candidate_tokens": 16}}
    net = load(write(tmp_path, config, raw))
    before = block_by_hand(raw, p="model.")
    normed = rms(before, raw["model.norm.weight"])
    output = by_net(net)
    same(net.head(output), linear(normed, HEAD))
    both = torch.cat([rms(EMBEDDING[BEFORE], raw["ar_approximation.norm.weight"], 1e-6), normed], -1)
    up, gate = linear(both, raw["ar_approximation.ug.weight"], raw["ar_approximation.ug.bias"]).chunk(2, -1)
    moved = before + linear(silu(gate) * up, raw["ar_approximation.d.weight"])
    same(corrected(net, output), linear(rms(moved, raw["model.norm.weight"]), HEAD))
    assert net.markov_head.embed_norm.eps == 1e-6  # written into its code, whatever the configuration says


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, HIDDEN)])
def test_a_mask_of_its_own(tmp_path: Path, shape: tuple[int, ...]) -> None:
    raw = block_tensors()
    mask = random(HIDDEN, seed=80)
    net = load(write(tmp_path, zlab(), {**raw, "mask_embedding": mask.view(shape)}))
    embedded = torch.cat([EMBEDDING[BLOCK[:1]], mask.double().expand(SIZE - 1, -1)])
    same(by_net(net), rms(block_by_hand(raw, embedded), raw["norm.weight"]))
    assert net.spec.mask_token is None


def test_rows_of_a_markov_table_follow_their_tokens(tmp_path: Path) -> None:
    shuffled = torch.tensor([9, 1, 10, 4, 5])
    raw = dspark_tensors(len(DRAFT))
    config = speculators("dspark", draft_vocab_size=len(DRAFT), markov_rank=3)
    net = load(write(tmp_path, config, {**raw, "d2t": shuffled - torch.arange(5)}))
    assert isinstance(net.markov_head, Markov)
    order = shuffled.argsort()
    assert torch.equal(net.markov_head.markov_w2.weight, raw["markov_head.markov_w2.weight"][order])
