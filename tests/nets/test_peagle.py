"""P-EAGLE as speculators writes it: EAGLE-3 with masks behind the text, and mostly with an embedding of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftwood.drafters.peagle import ParallelEagleDrafter
from draftwood.drafters.trained import drafter_of
from draftwood.growers import chain
from draftwood.nets.layouts import Layout, open_drafter, recognise
from nets.published import (
    EMBEDDING,
    HIDDEN,
    VOCABULARY,
    WORDS,
    attention,
    causal,
    causal_attend,
    decoder,
    layer_config,
    layer_tensors,
    linear,
    load,
    mlp,
    random,
    rms,
    same,
    write,
)

MASK, GUESSES = 6, 3
TEXT = torch.tensor([3, 9, 1, 4])


def tensors(embedding: Tensor) -> dict[str, Tensor]:
    return {
        **layer_tensors("layers.0.", width=2 * HIDDEN),
        **layer_tensors("layers.1.", seed=50),
        "layers.0.hidden_norm.weight": random(HIDDEN, seed=3),
        "fc.weight": random(HIDDEN, 2 * HIDDEN, seed=4),
        "norm.weight": random(HIDDEN, seed=5),
        "lm_head.weight": random(VOCABULARY, HIDDEN, seed=6),
        "mask_hidden": 3 * random(1, 1, 2 * HIDDEN, seed=7),
        "embed_tokens.weight": embedding,
    }


def config(**changes: object) -> dict[str, object]:
    return {
        "speculators_model_type": "peagle",
        "transformer_layer_config": layer_config(2),
        "eagle_aux_hidden_state_layer_ids": [2, 4],
        "mask_token_id": MASK,
        "speculators_config": {"algorithm": "peagle", "proposal_methods": [{"speculative_tokens": GUESSES}]},
        **changes,
    }


def by_hand(raw: dict[str, Tensor], embedding: Tensor, features: Tensor) -> Tensor:
    """Logits of all rows: those of the text, then the masks."""
    masks = GUESSES - 1
    features = torch.cat([features, raw["mask_hidden"][0].double().expand(masks, -1)])
    hidden = linear(features, raw["fc.weight"])
    embedded = embedding.double()[torch.cat([TEXT, torch.full((masks,), MASK)])]
    places = torch.arange(len(hidden))
    both = torch.cat(
        [rms(embedded, raw["layers.0.input_layernorm.weight"]), rms(hidden, raw["layers.0.hidden_norm.weight"])], -1
    )
    x = hidden + attention(raw, "layers.0.self_attn.", both, places, causal(len(hidden)))
    x = x + mlp(raw, "layers.0.mlp.", rms(x, raw["layers.0.post_attention_layernorm.weight"]))
    x = decoder(raw, "layers.1.", x, places, causal(len(hidden)))
    return linear(rms(x, raw["norm.weight"]), raw["lm_head.weight"])


def test_rows_behind_the_text_read_the_mask_and_what_was_learnt_for_a_feature(tmp_path: Path) -> None:
    own = random(VOCABULARY, HIDDEN, seed=8)
    raw = tensors(own)
    folder = write(tmp_path, config(), raw)
    assert recognise(open_drafter(folder)) is Layout.SPECULATORS_PEAGLE
    net = load(folder)
    assert (net.reads, net.ahead.mask_token, net.ahead.guesses) == ((1, 3), MASK, GUESSES)
    features = random(4, 2 * HIDDEN, seed=20) * 5
    hidden = net.fuse(torch.cat([features, net.mask_hidden.expand(GUESSES - 1, -1)]))
    drafter = drafter_of(net, WORDS, chain(5))
    assert isinstance(drafter, ParallelEagleDrafter)
    embedded = drafter.words.embed(torch.cat([TEXT, torch.full((GUESSES - 1,), MASK)]))
    output = net.run(embedded, hidden, torch.arange(4 + GUESSES - 1), causal_attend)
    same(net.logits(output), by_hand(raw, own, features.double()))
    assert drafter.grower.levels == GUESSES
    assert torch.equal(drafter.words.head(), WORDS.head())


def test_the_targets_embedding_is_read_where_it_has_none(tmp_path: Path) -> None:
    raw = tensors(torch.full((VOCABULARY, HIDDEN), float("nan")))
    net = load(write(tmp_path, config(speculators_config={}), raw))
    assert net.embed_tokens is None
    assert net.ahead.guesses == 8
    same(drafter_of(net, WORDS, chain(5)).words.embed(TEXT), EMBEDDING[TEXT])
