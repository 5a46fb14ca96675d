"""A trained drafter of a small model, in the shape of its stand-in: the same guesses at a large drafter's cost.

python benchmarks/standin_drafter.py DRAFTER OUT [--model smollm2] [--device cuda]

The network's own stream lies once, at the beginning of the large one, and zeros. It reads the stand-in's stream, which
lies there in several copies (standin.py), through norms that take the first. All norms are rounded to bfloat16 once
more than in the small network, which a draft can afford. Weights that only meet zeros are random.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from draftwood.model.checkpoint import Checkpoint, open_checkpoint
from draftwood.model.config import ModelConfig
from draftwood.nets.dflash import BlockNet, BlockSpec, Confidence, Markov
from draftwood.nets.eagle import Eagle3
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.export import export
from draftwood.nets.layouts import build_net, open_drafter
from draftwood.nets.parts import DraftHead
from standin import Shape, Stream


class Widening:
    """Where the small network's numbers lie in the large one's tensors."""

    def __init__(self, small: ModelConfig, shape: Shape, device: torch.device) -> None:
        self.small, self.shape, self.device = small, shape, device
        self.stream = Stream.within(small.hidden_size, shape.hidden)
        self.config = replace(
            small,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            norm_eps=small.norm_eps * small.hidden_size / shape.hidden,
        )
        group, wide = small.num_heads // small.num_kv_heads, shape.heads // shape.kv_heads
        half, stretch = small.head_dim // 2, shape.head_dim // small.head_dim
        dims = torch.arange(small.head_dim, device=device)
        turning = stretch * (dims % half) + dims // half * (shape.head_dim // 2)
        keys = torch.arange(small.num_kv_heads, device=device)
        queries = (keys[:, None] * wide + torch.arange(group, device=device)).flatten()
        self.query_rows = (queries[:, None] * shape.head_dim + turning).flatten()
        self.key_rows = (keys[:, None] * shape.head_dim + turning).flatten()
        self.value_rows = (keys[:, None] * shape.head_dim + dims).flatten()
        self.mixed = (queries[:, None] * shape.head_dim + dims).flatten()
        fed = torch.arange(small.num_kv_heads * wide, device=device)  # all queries of a real value head read something
        self.fed = (fed[:, None] * shape.head_dim + dims).flatten()
        self.hidden = torch.arange(small.hidden_size, device=device)
        self.inner = torch.arange(small.intermediate_size, device=device)

    @property
    def copied(self) -> float:
        """What a norm of the stand-in's stream is too small by."""
        return math.sqrt(self.stream.shrinkage)

    @property
    def single(self) -> float:
        """The same of the network's own stream."""
        return math.sqrt(self.small.hidden_size / self.shape.hidden)

    def norm(self, weight: Tensor, size: float) -> Tensor:
        """Of the first copy; what else there is does not pass."""
        out = torch.zeros(self.shape.hidden, device=self.device)
        out[: len(weight)] = weight.to(self.device) * size
        return out

    def matrix(self, name: str, weight: Tensor, rows: Tensor, columns: Tensor, size: tuple[int, int]) -> Tensor:
        """The small one at rows x columns, zeros in what else these columns have, noise where nothing comes in."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        out = torch.randn(size, generator=generator).to(self.device) * weight.float().std().to(self.device)
        out[:, columns] = 0
        out[rows[:, None], columns] = weight.to(self.device).float()
        return out

    def layer(self, large: nn.Module, small: nn.Module, name: str, wide: int, rows: Tensor) -> None:
        """Attention and mlp of one layer, whose attention reads `wide` streams and which adds to rows of its own."""
        own, theirs = large.self_attn, small.self_attn  # type: ignore[attr-defined]
        columns = torch.cat([self.hidden + i * self.shape.hidden for i in range(wide)])
        width = wide * self.shape.hidden
        stretch = math.sqrt(self.shape.head_dim / self.small.head_dim)
        for part, places in (("q", self.query_rows), ("k", self.key_rows), ("v", self.value_rows)):
            weight = getattr(theirs, f"{part}_proj").weight * (stretch if part == "q" else 1.0)
            target = getattr(own, f"{part}_proj")
            size = (target.out_features, width)
            target.weight.data = self.matrix(f"{name}.{part}", weight, places, columns, size)
        self._adding(own.o_proj, theirs.o_proj, f"{name}.o", self.mixed, rows)
        for part in ("gate", "up"):
            weight, target = getattr(small.mlp, f"{part}_proj").weight, getattr(large.mlp, f"{part}_proj")  # type: ignore[attr-defined]
            size = (self.shape.inner, self.shape.hidden)
            target.weight.data = self.matrix(f"{name}.{part}", weight, self.inner, self.hidden, size)
        self._adding(large.mlp.down_proj, small.mlp.down_proj, f"{name}.down", self.inner, rows)  # type: ignore[attr-defined]

    def _adding(self, large: nn.Linear, small: nn.Linear, name: str, columns: Tensor, rows: Tensor) -> None:
        """A product that is added to the stream, once or to every copy."""
        weight = small.weight.repeat(len(rows) // small.out_features, 1)
        whole = torch.zeros(len(rows), large.in_features, device=self.device)
        whole[:, columns] = weight.to(self.device).float()
        fed = self.fed if columns is self.mixed else columns
        large.weight.data = self.matrix(name, whole[:, fed], rows, fed, (large.out_features, large.in_features))


def widened_eagle(net: Eagle3, wide: Widening, words: TargetEmbeddings) -> Eagle3:
    """EAGLE-3 whose features and outputs lie once in the large stream."""
    spec = replace(net.spec, target_hidden=wide.shape.hidden)
    tokens = net.head.tokens
    config = replace(wide.config, num_layers=net.config.num_layers, windows=net.config.windows)
    large = Eagle3(config, spec, DraftHead(words.head(tokens), tokens, words.config.vocab_size, own=False))
    if not (spec.fc_norm and spec.norm_output and config.num_layers == 1):
        raise SystemExit("Only EAGLE-3 of one layer with norms of its own can be widened.")
    for own, theirs in zip(large.fc_norm, net.fc_norm, strict=True):
        own.weight.data = wide.norm(theirs.weight, wide.copied)  # type: ignore[union-attr]
    columns = torch.cat([wide.hidden + i * wide.shape.hidden for i in range(len(spec.reads))])
    size = (wide.shape.hidden, len(spec.reads) * wide.shape.hidden)
    large.fc.weight.data = wide.matrix("fc", net.fc.weight, wide.hidden, columns, size)
    own, theirs = large.layers[0], net.layers[0]
    own.input_layernorm.weight.data = wide.norm(theirs.input_layernorm.weight, wide.copied)  # type: ignore[union-attr]
    for name in ("hidden_norm", "post_attention_layernorm"):
        getattr(own, name).weight.data = wide.norm(getattr(theirs, name).weight, wide.single)
    wide.layer(own, theirs, "layers.0", 2, wide.hidden)
    large.norm.weight.data = wide.norm(net.norm.weight, wide.single)
    return large


def widened_block(net: BlockNet, wide: Widening, words: TargetEmbeddings) -> BlockNet:
    """A block network whose rows begin with the stand-in's words, and so lie in as many copies as those."""
    if net.spec.norm_in_head or not isinstance(net.markov_head, Markov):
        raise SystemExit("Only block networks with a Markov table can be widened.")
    tokens = net.head.tokens
    config = replace(wide.config, num_layers=net.config.num_layers, windows=net.config.windows)
    config = replace(config, norm_eps=net.config.norm_eps * wide.stream.shrinkage)  # nearly all norms see the copies
    head = DraftHead(words.head(tokens), tokens, words.config.vocab_size, own=False)
    spec: BlockSpec = replace(net.spec, target_hidden=wide.shape.hidden)
    sure = Confidence(wide.shape.hidden, net.markov_head) if net.confidence_head is not None else None
    large = BlockNet(config, spec, head, net.markov_head, sure)
    columns = torch.cat([wide.hidden + i * wide.shape.hidden for i in range(len(spec.reads))])
    size = (wide.shape.hidden, len(spec.reads) * wide.shape.hidden)
    # Features are not normed before they are fused: of the copies, the first is read.
    every = torch.arange(size[1], device=wide.device)
    whole = torch.zeros(wide.small.hidden_size, size[1], device=wide.device)
    whole[:, columns] = net.fc.weight.to(wide.device).float()
    large.fc.weight.data = wide.matrix("fc", whole, wide.hidden, every, size)
    large.hidden_norm.weight.data = wide.norm(net.hidden_norm.weight, wide.single)
    copies = torch.arange(wide.small.hidden_size * wide.stream.copies, device=wide.device)
    for i, (own, theirs) in enumerate(zip(large.layers, net.layers, strict=True)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(own, name).weight.data = wide.norm(getattr(theirs, name).weight, wide.copied)
        wide.layer(own, theirs, f"layers.{i}", 1, copies)
    large.norm.weight.data = wide.norm(net.norm.weight, wide.copied)
    if large.mask_embedding is not None and net.mask_embedding is not None:
        padding = wide.shape.hidden - len(copies)
        mask = net.mask_embedding.to(wide.device).repeat(wide.stream.copies)
        large.mask_embedding.data = torch.nn.functional.pad(mask, (0, padding))
    if sure is not None and net.confidence_head is not None:
        small = net.confidence_head.proj.weight
        kept = small[:, : wide.small.hidden_size].to(wide.device)
        spare = torch.zeros(1, wide.shape.hidden - wide.small.hidden_size, device=wide.device)
        sure.proj.weight.data = torch.cat([kept, spare, small[:, wide.small.hidden_size :].to(wide.device)], 1)
        sure.proj.bias.data = net.confidence_head.proj.bias.to(wide.device)
    return large


@torch.no_grad()
def widen(
    drafter: Path,
    small: Checkpoint,
    large: Checkpoint,
    out: Path,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the large drafter."""
    own = large.config
    shape = Shape(own.num_layers, own.hidden_size, own.num_heads, own.num_kv_heads, own.head_dim, own.intermediate_size)
    net = build_net(open_drafter(drafter), small.config, TargetEmbeddings(small, device, torch.float32)).to(device)
    words = TargetEmbeddings(large, device, torch.float32)
    wide = Widening(small.config, shape, device)
    made = widened_eagle(net, wide, words) if isinstance(net, Eagle3) else None
    if isinstance(net, BlockNet):
        made = widened_block(net, wide, words)
    if made is None:
        raise SystemExit(f"A {type(net).__name__} cannot be widened.")
    export(made, out, large.name, {"widened_from": drafter.name}, dtype=dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2", help="what the stand-in was built from")
    parser.add_argument("--standin", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    small, large = open_checkpoint(given.model), open_checkpoint(given.standin)
    widen(given.drafter, small, large, given.out, torch.device(given.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
