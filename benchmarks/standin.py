"""A small real model's function inside a large model's shape: real text and real acceptance at the large one's cost.

python benchmarks/standin.py OUT [--model smollm2] [--small OUT2] [--device cuda] [--check]

Every engine loads OUT as the ordinary Hugging Face folder it is. The function is kept by exact zero-padding:
- The residual stream lies in the larger one as several equal copies, and zeros. A norm's mean is then over other
  numbers, so its eps is multiplied by f^2 = copies * old / new size and its weights by f. In the default shape f is
  3/8 for one copy: norms would be rounded, and 7 of 1,000 likeliest tokens with them. Four copies make it 3/4 = 1/2 +
  1/4: two of them carry exactly these shares of the weights, and the others' weights are zero.
- Head j of keys and values stays head j; its queries stay the first ones of its group. Rotary dimension i of a head
  twice as large goes to 2 i (and i + half to 2 i + new half), which turn at the old speed. Queries are multiplied by
  sqrt(new / old head size), by which scores are divided more.
- New layers add nothing to the stream.
Weights that only ever meet zeros are random, of the size of the real ones, and so are those whose products meet only
zeros later: nothing is compressible, and attention has something to do in every head.

What it costs: everything is bfloat16, and queries times sqrt 2 are rounded once more, by up to 1 part in 256. `--check`
says how often the likeliest token differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood.model.checkpoint import Checkpoint, open_checkpoint
from draftwood.model.config import ModelConfig
from standin_check import MATRICES, NORMS, check

SHARD_BYTES = 2_000_000_000  # small enough that shards are written side by side
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Shape:
    """The large model's sizes; those of an 8 B Llama unless said otherwise."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    positions: int = 40960  # room for 32k tokens; beyond the small model's own context the text means nothing

    def problem(self, small: ModelConfig) -> str | None:
        """Why `small` does not fit in, None if it does."""
        pairs = {
            "layers": (self.layers, small.num_layers),
            "hidden": (self.hidden, small.hidden_size),
            "kv-heads": (self.kv_heads, small.num_kv_heads),
            "heads of a group": (self.heads // self.kv_heads, small.num_heads // small.num_kv_heads),
            "head-dim": (self.head_dim, small.head_dim),
            "inner": (self.inner, small.intermediate_size),
        }
        for name, (large, own) in pairs.items():
            if large < own:
                return f"{name} is {large} where the small model already has {own}"
        if self.heads % self.kv_heads or self.head_dim % small.head_dim:
            return "heads must be a multiple of kv-heads, and head-dim of the small model's"
        if small.family != "llama" or small.qkv_bias or small.qk_norm or small.rope.kind != "default":
            return f"{small.family} with these biases, norms or positions is not a plain Llama"
        return None


@dataclass(frozen=True)
class Place:
    """Where a small matrix lies in the large one, and which part of the rest has to be zero; all of them indices."""

    rows: Tensor  # [r]
    columns: Tensor  # [c]
    zero_rows: Tensor  # [z]
    zero_columns: Tensor  # [y]
    factor: float = 1.0

    def fill(self, noise: Tensor, weight: Tensor) -> Tensor:
        """`noise` with zeros and as many copies of the small weight as have a place. [R, C], [a, b] -> [R, C]."""
        noise[self.zero_rows[:, None], self.zero_columns] = 0
        if len(self.rows):
            copies = weight.repeat(len(self.rows) // weight.shape[0], len(self.columns) // weight.shape[1])
            noise[self.rows[:, None], self.columns] = (copies.float() * self.factor).to(noise.dtype)
        return noise


@dataclass(frozen=True)
class Stream:
    """How the small residual stream lies in the large one."""

    copies: int
    shares: tuple[float, ...]  # of a norm's weights, copy by copy; copies without one get no weight
    shrinkage: float  # of the mean square

    @classmethod
    def within(cls, small: int, large: int) -> Stream:
        """With shares that round nothing, where some number of copies has such."""
        for copies in range(1, large // small + 1):
            square = Fraction(copies * small, large)
            over, under = math.isqrt(square.numerator), math.isqrt(square.denominator)
            powers = [1 << bit for bit in range(over.bit_length()) if over >> bit & 1]
            exact = (over * over, under * under) == (square.numerator, square.denominator)
            if exact and under.bit_count() == 1 and len(powers) <= copies:
                return cls(copies, tuple(power / under for power in reversed(powers)), float(square))
        return cls(1, (math.sqrt(small / large),), small / large)


class Places:
    """Where everything of a layer goes."""

    def __init__(self, small: ModelConfig, shape: Shape, lies: Stream, device: torch.device) -> None:
        def upto(end: int) -> Tensor:
            return torch.arange(end, device=device)

        stretch, half = shape.head_dim // small.head_dim, small.head_dim // 2
        kv, group, wide = small.num_kv_heads, small.num_heads // small.num_kv_heads, shape.heads // shape.kv_heads
        turning = stretch * (upto(small.head_dim) % half) + upto(small.head_dim) // half * (shape.head_dim // 2)
        key_heads = upto(kv) * shape.head_dim
        query_heads = (upto(kv)[:, None] * wide + upto(group)).flatten() * shape.head_dim
        fed_heads = upto(kv * wide) * shape.head_dim  # all queries of a real value head read something
        values = upto(small.head_dim)  # nothing turns them: side by side, so that groups of quantised weights stay pure
        none, inner = upto(0), upto(small.intermediate_size)
        hidden = upto(small.hidden_size * len(lies.shares))  # what comes out of a norm
        copies = upto(small.hidden_size * lies.copies)  # what is added to the stream
        stream, feeding = upto(shape.hidden), upto(shape.inner)
        value_rows, key_rows = upto(shape.kv_heads * shape.head_dim), upto(kv * shape.head_dim)
        self.real = {
            "q": Place(_both(query_heads, turning), hidden, none, none, math.sqrt(stretch)),
            "k": Place(_both(key_heads, turning), hidden, key_rows, hidden),
            "v": Place(_both(key_heads, values), hidden, value_rows, hidden),
            "o": Place(copies, _both(query_heads, values), stream, _both(fed_heads, values)),
            "gate": Place(inner, hidden, none, none),
            "up": Place(inner, hidden, feeding, hidden),
            "down": Place(copies, inner, stream, inner),
        }
        # No values, no products of gates: whatever the output and down projections are, they are multiplied by zero.
        nothing = Place(none, none, none, none)
        self.idle = dict.fromkeys(self.real, nothing)
        self.idle |= {"v": Place(none, none, value_rows, hidden), "up": Place(none, none, feeding, hidden)}
        self.embedding = Place(upto(small.vocab_size), copies, upto(small.vocab_size), stream)
        self.head = Place(upto(small.vocab_size), hidden, none, none)


def _both(heads: Tensor, dimensions: Tensor) -> Tensor:
    return (heads[:, None] + dimensions).flatten()


class StandIn:
    """Makes the large model's tensors, one at a time and each by itself."""

    def __init__(self, small: Checkpoint, shape: Shape, device: torch.device) -> None:
        problem = shape.problem(small.config)
        if problem:
            raise SystemExit(f"{small.name} cannot be put into this shape: {problem}.")
        self.config, self.shape, self.device = small.config, shape, device
        self.weights = read_small(small, device)
        self.stream = Stream.within(small.config.hidden_size, shape.hidden)
        self.places = Places(small.config, shape, self.stream, device)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and size, in the order of the files."""
        own, vocabulary = self.shape, self.config.vocab_size
        queries, keys = own.heads * own.head_dim, own.kv_heads * own.head_dim
        layer = {
            **dict.fromkeys(NORMS, (own.hidden,)),
            "self_attn.q_proj": (queries, own.hidden),
            "self_attn.k_proj": (keys, own.hidden),
            "self_attn.v_proj": (keys, own.hidden),
            "self_attn.o_proj": (own.hidden, queries),
            "mlp.gate_proj": (own.inner, own.hidden),
            "mlp.up_proj": (own.inner, own.hidden),
            "mlp.down_proj": (own.hidden, own.inner),
        }
        names = {f"model.layers.{i}.{part}.weight": size for i in range(own.layers) for part, size in layer.items()}
        matrix = (vocabulary, own.hidden)
        return {EMBEDDING: matrix, **names, FINAL_NORM: (own.hidden,), HEAD: matrix}

    def tensor(self, name: str, size: tuple[int, ...]) -> Tensor:
        """One tensor in bfloat16, always the same on the same kind of device."""
        if len(size) == 1:
            return self._norm(name, size)
        weight, place = self._source(name)
        # The same scale as the real ones. In place: a head of 8 B takes 0.4 GB as it is.
        noise = self._noise(name, size).mul_(float(weight.float().std()))
        return place.fill(noise, weight)

    def _norm(self, name: str, size: tuple[int, ...]) -> Tensor:
        weight = self.weights[self._real_name(name)].float()
        own = torch.zeros(self.stream.copies, len(weight), device=self.device)
        for copy, share in zip(own, self.stream.shares, strict=False):
            copy.copy_(weight * share)
        spread = (weight.mean() + weight.std() * self._noise(name, size).float()) * math.sqrt(self.stream.shrinkage)
        return torch.cat([own.flatten(), spread[own.numel() :]]).bfloat16()

    def _source(self, name: str) -> tuple[Tensor, Place]:
        if name in (EMBEDDING, HEAD):
            weight = self.weights.get(name, self.weights[EMBEDDING])  # a tied model's head is its embedding
            return weight, self.places.embedding if name == EMBEDDING else self.places.head
        part = name.split(".")[-2].removesuffix("_proj")
        real = self._real_name(name)
        return self.weights[real], (self.places.real if real == name else self.places.idle)[part]

    def _real_name(self, name: str) -> str:
        """The small model's tensor of this name; new layers look like its last one."""
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(min(int(parts[2]), self.config.num_layers - 1))
        return ".".join(parts)

    def _noise(self, name: str, size: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(size, generator=generator, device=self.device, dtype=torch.bfloat16)


def read_small(small: Checkpoint, device: torch.device) -> dict[str, Tensor]:
    """All tensors by name, rounded to bfloat16: what the small model is for every engine."""
    layers = [f"model.layers.{i}.{part}.weight" for i in range(small.config.num_layers) for part in (*NORMS, *MATRICES)]
    names = [EMBEDDING, *layers, FINAL_NORM, *([] if small.config.tied_head else [HEAD])]
    return {name: small.tensor(name).to(torch.bfloat16).to(device) for name in names}


# Files


def save_model(folder: Path, sizes: Mapping[str, tuple[int, ...]], tensor: Callable[[str], Tensor]) -> None:
    """Safetensors shards and their index; each shard is written by a thread of its own, tensor by tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(sizes))
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]

    def write(file: str, names: Sequence[str]) -> None:
        write_shard(folder / file, {name: sizes[name] for name in names}, tensor)

    with ThreadPoolExecutor(min(len(shards), os.cpu_count() or 1, 8)) as pool:
        for _ in pool.map(write, files, shards):
            pass
    total = sum(2 * math.prod(size) for size in sizes.values())
    where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _shards(sizes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        more = 2 * math.prod(size)
        if names and held + more > SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += more
    yield names


def write_shard(path: Path, sizes: Mapping[str, tuple[int, ...]], tensor: Callable[[str], Tensor]) -> None:
    """One safetensors file of bfloat16: no more than one tensor is ever in memory, which their own writer cannot do."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in sizes.items():
        end = at + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sizes:
            file.write(tensor(name).cpu().contiguous().view(torch.int16).numpy().data)


def save_description(folder: Path, small: Checkpoint, sizes: Mapping[str, Any]) -> None:
    """Tokenizer, generation settings and, last of all, the configuration: with it the folder is complete."""
    config, tokenizer = small.config, small.tokenizer()
    ends = sorted(config.eos_token_ids)
    special = {"bos_token_id": config.bos_token_id, "eos_token_id": ends[-1] if len(ends) == 1 else ends}
    (folder / "tokenizer.json").write_text(tokenizer._backend.to_str())
    conventions = tokenizer._conventions
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": sizes["max_position_embeddings"],
            "chat_template": conventions.chat_template,
            **conventions.special_tokens,
        },
    )
    _write_json(folder / "generation_config.json", {**special, "_from_model_config": True})
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": config.rope.theta,
            "torch_dtype": "bfloat16",
            **special,
            **sizes,
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))


def build(small: Checkpoint, folder: Path, shape: Shape, device: torch.device) -> None:
    """Write the stand-in."""
    model = StandIn(small, shape, device)
    sizes = model.sizes()
    save_model(folder, sizes, lambda name: model.tensor(name, sizes[name]))
    described = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max(shape.positions, small.config.max_positions),
        "rms_norm_eps": small.config.norm_eps * model.stream.shrinkage,
        "tie_word_embeddings": False,
    }
    save_description(folder, small, described)


def build_small(small: Checkpoint, folder: Path) -> None:
    """Write the small model itself in the same form, for engines that read no GGUF."""
    weights = read_small(small, torch.device("cpu"))
    config = small.config
    save_model(folder, {name: tuple(weight.shape) for name, weight in weights.items()}, weights.__getitem__)
    described = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
    }
    save_description(folder, small, described)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2", help="the small model: an alias, a folder or a .gguf file")
    parser.add_argument("--small", type=Path, help="write the small model itself there as well")
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="compare with what --small wrote")
    given = parser.parse_args()
    if given.check and not given.small:
        parser.error("--check compares with the folder of --small; name one")
    return given


def main() -> int:
    given = arguments()
    device, small = torch.device(given.device), open_checkpoint(given.model)
    start = time.perf_counter()
    build(small, given.out, Shape(**{name: getattr(given, name) for name in vars(Shape())}), device)
    written = sum(file.stat().st_size for file in given.out.glob("*.safetensors"))
    print(f"{given.out}: {written / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s", flush=True)
    if given.small:
        build_small(small, given.small)
    # Against the bfloat16 weights it was made of, not against what a GGUF file says in more digits.
    return 0 if not given.check or check(open_checkpoint(given.small), given.out, device) else 1


if __name__ == "__main__":
    sys.exit(main())
