"""Networks on the GPU's kernels: the same drafts as their modules, one copy of every weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import captured
from captured import DEVICE, GPU, CapturedHarness
from draftwood.drafters import dflash, eagle
from draftwood.growers import Best, Levels, chain
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.native import CudaLayers
from draftwood.nets.parts import DraftHead
from draftwood.ops.cuda.eagle3_input import side_by_side as by_kernel
from draftwood.ops.eagle3_input import PairNorms, side_by_side
from draftwood.request import SamplingParams
from listening import Said, listen
from tiny import Ask, TinyCheckpoint, random_net, tiny_config, tiny_runner, with_net

F32 = torch.float32
CONFIG = tiny_config(head_dim=64) if GPU else tiny_config()  # the GPU's products have a least size
KINDS = ("eagle3", "eagle31", "dflash", "dspark")


def said(kind: str, grower: Levels) -> list[Said]:
    """What a network says of the first nodes of every level while steps run that may not look at values."""
    harness = CapturedHarness(with_net(kind, grower, TinyCheckpoint(CONFIG), DEVICE)(F32), "match")
    heard = listen(harness)
    harness.runner.captures = not GPU  # what listens looks at values, which graphs cannot
    prompts = [(1, 2), (7, 7, 8, 7, 7)]
    harness.run([Ask(p, SamplingParams(temperature=1.0, seed=i, max_tokens=5)) for i, p in enumerate(prompts)])
    return heard


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("eagle3", "chain"), ("eagle3", "tree"), ("eagle31", "chain"), ("dflash", "tree"), ("dspark", "chain")],
)
def test_kernels_guess_what_modules_guess(kind: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grower = chain(2) if shape == "chain" else Levels((2, 2), Best())
    monkeypatch.setattr(
        captured, "runner", lambda num_pages, page_size: tiny_runner(CONFIG, dtype=F32, page_size=16, device=DEVICE)
    )
    for drafter in (eagle, dflash):
        monkeypatch.setattr(drafter, "native_layers", lambda *_: None)
    want = said(kind, grower)
    for drafter in (eagle, dflash):
        monkeypatch.setattr(drafter, "native_layers", CudaLayers)
    monkeypatch.setattr(eagle, "side_by_side", by_kernel)
    got = said(kind, grower)
    assert len(got) == len(want) > 10
    for ours, theirs in zip(got, want, strict=True):
        assert ours[:2] == theirs[:2]
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "peagle"])
def test_there_is_one_copy_of_every_weight(kind: str) -> None:
    words = TargetEmbeddings(TinyCheckpoint(CONFIG), DEVICE, F32)
    net: Any = random_net(kind, words)
    if kind == "peagle":  # published ones bring an embedding, which has the name that heads go by here
        net.embed_tokens = torch.nn.Embedding.from_pretrained(words.embed(torch.arange(13, device=DEVICE)))
    head, before = net.head.matrix.clone(), {name: weight.clone() for name, weight in net.state_dict().items()}
    views = CudaLayers(net, net.config, net.head, words)._decoder.views()  # type: ignore[attr-defined]
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, before[name]), "handing over changes nothing"
        if name.startswith(("layers.", "norm.")) and "hidden_norm" not in name:
            assert weight.data_ptr() == views[f"model.{name}"].data_ptr()
    assert net.head.matrix.data_ptr() == views["model.embed_tokens.weight"].data_ptr()
    assert torch.equal(net.head.matrix, head)


@pytest.mark.parametrize(("kind", "own"), [("eagle3", True), ("dspark", False)])
def test_what_a_network_learns_while_it_drafts_reaches_the_kernels(
    kind: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place: graphs have been captured by then."""
    for drafter in (eagle, dflash):
        monkeypatch.setattr(drafter, "native_layers", CudaLayers)
    target = tiny_runner(CONFIG, dtype=F32, page_size=16, device=DEVICE)
    drafter: Any = with_net(kind, chain(2), TinyCheckpoint(CONFIG), DEVICE)(F32)
    if own:
        old = drafter.net.head
        drafter.net.head = drafter.net.lm_head = DraftHead(old.matrix.clone(), old.tokens, old.vocabulary, own=True)
    drafter.attach(target)
    kernels = {name: view.data_ptr() for name, view in drafter._native._decoder.views().items()}
    weights = {name: 1.5 * weight for name, weight in drafter.module.named_parameters()}
    drafter.update(weights)
    views = drafter._native._decoder.views()
    assert kernels == {name: view.data_ptr() for name, view in views.items()}
    changed = {f"model.{name}": weight for name, weight in weights.items() if f"model.{name}" in views}
    assert len(changed) >= 10
    assert all(torch.equal(views[name], weight) for name, weight in changed.items())
    assert not own or torch.equal(views["model.embed_tokens.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize("before_residual", [False, True])
def test_token_and_feature_side_by_side(before_residual: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    table, features = (torch.randn(n, 40, generator=generator).to(DEVICE) for n in (13, 6))
    gains = [torch.rand(40, generator=generator).to(DEVICE) for _ in range(2)]
    tokens, rows = (torch.randint(n, (9,), generator=generator).to(DEVICE) for n in (13, 6))
    norms = PairNorms(gains[0], gains[1], 1e-5, before_residual)
    cpu = torch.device("cpu")
    on_cpu = replace(norms, token=norms.token.to(cpu), feature=norms.feature.to(cpu))
    want = side_by_side(table.to(cpu), tokens.to(cpu), features.to(cpu), rows.to(cpu), on_cpu)
    for ours, theirs in zip(by_kernel(table, tokens, features, rows, norms), want, strict=True):
        torch.testing.assert_close(ours.to(cpu), theirs, rtol=1e-5, atol=1e-6)
