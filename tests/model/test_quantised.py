"""Quantised safetensors: each format's own numbers, on our kernels too; what is not read is refused with advice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.errors import CheckpointError
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.native import NativeTransformer
from draftwood.model.quantised import TABLES, Scheme, read_scaled
from draftwood.model.runner import ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS, Storage
from draftwood.ops.native import kernels
from draftwood.request import SamplingParams
from draftwood.verifiers import LAWS
from tiny import CPU, Ask, Harness, generated

from .conftest import HF_CONFIG, VOCAB, hf_tensors
from .test_blocks import always, logits, runner_of

Tensors = dict[str, Tensor]
Made = tuple[Tensors, Tensor]  # what is stored under a stem, and the weights [out, in] it stands for
GROUP = 32


def draw(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def scales_for(shape: tuple[int, ...], dtype: torch.dtype, size: float) -> Tensor:
    return (size * (1 + torch.rand(shape, generator=torch.Generator().manual_seed(7)))).to(dtype)


def packed(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes into 32-bit words along a dimension, written from the definition: one code at a time."""
    per_word = 32 // bits
    rows = codes.movedim(dim, 0)
    words = torch.zeros(-(-len(rows) // per_word), *rows.shape[1:], dtype=torch.int64)
    for i, row in enumerate(rows):
        place = i % per_word if order is None else order.index(i % per_word)
        words[i // per_word] |= row.long() << bits * place
    return words.to(torch.int32).movedim(0, dim).contiguous()


def awq(outputs: int, inputs: int) -> Made:
    codes, zeros = draw(0, 16, inputs, outputs), draw(0, 16, inputs // GROUP, outputs, seed=1)
    scales = scales_for(tuple(zeros.shape), torch.float16, 0.01)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    weight = (codes - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)
    return {"qweight": packed(codes, 4, 1, order), "qzeros": packed(zeros, 4, 1, order), "scales": scales}, weight.t()


def gptq(outputs: int, inputs: int, bits: int = 4, ordered: bool = False, less: int = 1, zero: int = 0) -> Made:
    middle = 1 << bits - 1
    codes = draw(0, 1 << bits, inputs, outputs)
    zeros = draw(1, 1 << bits, inputs // GROUP, outputs, seed=1) if not zero else torch.full(
        (inputs // GROUP, outputs), middle
    )  # fmt: skip
    group_of = torch.arange(inputs) // GROUP
    if ordered:
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]
    scales = scales_for(tuple(zeros.shape), torch.float16, 0.04 / middle)
    weight = (codes - zeros[group_of]) * scales.float()[group_of]
    parts = {"qweight": packed(codes, bits, 0), "qzeros": packed(zeros - less, bits, 1), "scales": scales}
    return {**parts, "g_idx": group_of.int()}, weight.t()


def compressed_int4(outputs: int, inputs: int, symmetric: bool = True, scale: torch.dtype = torch.bfloat16) -> Made:
    codes = draw(-8, 8, outputs, inputs)
    scales = scales_for((outputs, inputs // GROUP), scale, 0.01)
    parts = {"weight_packed": packed(codes + 8, 4, 1), "weight_scale": scales}
    parts["weight_shape"] = torch.tensor([outputs, inputs])
    if symmetric:
        return parts, codes * scales.float().repeat_interleave(GROUP, 1)
    zeros = draw(-8, 8, outputs, inputs // GROUP, seed=1)
    parts["weight_zero_point"] = packed(zeros + 8, 4, 0)
    return parts, (codes - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)


def compressed_int8(outputs: int, inputs: int) -> Made:
    codes, scales = draw(-128, 128, outputs, inputs).to(torch.int8), scales_for((outputs, 1), torch.bfloat16, 1e-3)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def float8(outputs: int, inputs: int, kind: str = "tensor", name: str = "weight_scale") -> Made:
    values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3)) * 30
    codes = values.to(torch.float8_e4m3fn)
    if kind == "block":
        scales = scales_for((-(-outputs // GROUP), -(-inputs // GROUP)), torch.float32, 2e-3)
        wide = scales.repeat_interleave(GROUP, 0)[:outputs].repeat_interleave(GROUP, 1)[:, :inputs]
        return {"weight": codes, name: scales}, codes.float() * wide
    scales = scales_for((outputs, 1) if kind == "channel" else (1,), torch.float32, 2e-3)
    return {"weight": codes, name: scales, "input_scale": torch.ones(1)}, codes.float() * scales


def nvfp4(outputs: int, inputs: int, compressed: bool = False) -> Made:
    codes = draw(0, 16, outputs, inputs)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))
    scales = scales_for((outputs, inputs // 16), torch.float32, 20.0).to(torch.float8_e4m3fn)
    whole = torch.tensor(700.0 if compressed else 0.0007)
    wide = scales.float() / whole if compressed else scales.float() * whole
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    names = ("weight_packed", "weight_global_scale") if compressed else ("weight", "weight_scale_2")
    parts = {names[0]: pairs, "weight_scale": scales, names[1]: whole}
    return {**parts, "input_scale": torch.ones(1)}, values * wide.repeat_interleave(16, 1)


def bitsandbytes4(outputs: int, inputs: int, kind: str = "nf4", nested: bool = True) -> Made:
    """Weights in a row in blocks of 64, whatever the rows; scales in blocks of 4."""
    count, each, more = outputs * inputs, 64, 4
    codes, table = draw(0, 16, count), TABLES[kind.upper()].clone()
    blocks = -(-count // each)
    state: dict[str, object] = {"quant_type": kind, "blocksize": each, "shape": [outputs, inputs], "dtype": "bfloat16"}
    parts = {"weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
    scale = scales_for((blocks,), torch.float32, 0.05)
    if nested:
        steps, own = torch.linspace(-1, 1, 256), scales_for((-(-blocks // more),), torch.float32, 0.02)
        absmax = draw(0, 256, blocks, seed=2)
        scale = steps[absmax] * own.repeat_interleave(more)[:blocks] + 0.05
        parts |= {"weight.nested_quant_map": steps, "weight.nested_absmax": own}
        state |= {"nested_blocksize": more, "nested_dtype": "float32", "nested_offset": 0.05}
    parts["weight.absmax"] = absmax.to(torch.uint8) if nested else scale
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return parts, (table[codes] * scale.repeat_interleave(each)[:count]).view(outputs, inputs)


def bitsandbytes8(outputs: int, inputs: int) -> Made:
    codes, scales = draw(-127, 128, outputs, inputs).to(torch.int8), scales_for((outputs,), torch.float32, 0.05)
    parts = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * (scales / 127)[:, None]


def ct(form: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


FORMS: dict[str, tuple[dict[str, Any], Callable[[int, int], Made]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, gptq),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda o, i: gptq(o, i, ordered=True),
    ),
    "gptq-v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, lambda o, i: gptq(o, i, less=0)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, lambda o, i: gptq(o, i, 8, zero=1)),
    "gptq-2": ({"quant_method": "gptq", "bits": 2}, lambda o, i: gptq(o, i, 2)),
    "w4a16": (ct("pack-quantized"), compressed_int4),
    "w4a16-asym": (ct("pack-quantized"), lambda o, i: compressed_int4(o, i, False)),
    "w4a16-float32-scales": (ct("pack-quantized"), lambda o, i: compressed_int4(o, i, scale=torch.float32)),
    "w8a8-int8": (ct("int-quantized"), compressed_int8),
    "ct-fp8-channel": (ct("float-quantized"), lambda o, i: float8(o, i, "channel")),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, float8),
    "fp8-blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
        lambda o, i: float8(o, i, "block", "weight_scale_inv"),
    ),
}
FORMS |= {
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "ct-nvfp4": (ct("nvfp4-pack-quantized"), lambda o, i: nvfp4(o, i, compressed=True)),
}
FORMS |= {
    "bnb-nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes4),
    "bnb-fp4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda o, i: bitsandbytes4(o, i, "fp4", nested=False),
    ),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes8),
}
EXPANDED = ("gptq-act-order", "nvfp4", "ct-nvfp4")  # no blocks of ours hold it


def write(folder: Path, form: str) -> tuple[Path, Tensors]:
    """A tiny Llama with quantised projections, and all its weights as they should be read."""
    stated, make = FORMS[form]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, "quantization_config": stated}))
    stored, wanted = {}, {}
    for name, tensor in hf_tensors().items():
        if "_proj.weight" in name:
            parts, wanted[name] = make(*tensor.shape)
            stored |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            stored[name] = wanted[name] = tensor
    save_file(stored, folder / "model.safetensors")
    return folder, wanted


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_the_format_defines(tmp_path: Path, form: str) -> None:
    folder, wanted = write(tmp_path / "m", form)
    checkpoint = open_checkpoint(folder)
    for name, weight in wanted.items():
        assert checkpoint.has(name)
        assert torch.equal(checkpoint.tensor(name), weight), name


@pytest.mark.parametrize("form", FORMS)
def test_our_kernels_compute_with_the_same_weights(tmp_path: Path, form: str) -> None:
    library = kernels()
    if library is None:
        pytest.skip("no kernels here")
    folder, wanted = write(tmp_path / "m", form)
    checkpoint = open_checkpoint(folder)
    for name, weight in wanted.items():
        blocks = checkpoint.blocks(name)
        assert (blocks is None) == ("_proj.weight" not in name or form in EXPANDED)
        if blocks is not None:
            assert torch.equal(blocks.numbers(library), weight)
    model = NativeTransformer(library, checkpoint, FORMATS["stored"])
    assert (model._model.layers[0].down.storage == Storage.BLOCKS) == (form not in EXPANDED)
    text = [i * 7 % VOCAB for i in range(23)]
    native, torchs = runner_of(model), runner_of(Transformer(open_checkpoint(folder), torch.float64, CPU))
    alone, want = logits(native, text, always(1)), logits(torchs, text, always(64))
    assert float((alone - want).abs().max() / want.abs().max()) < 1e-5
    assert torch.equal(logits(native, text, always(5)), alone)


@pytest.mark.parametrize("form", ["awq", "gptq-act-order", "bnb-nf4", "w8a8-int8", "fp8-blocks", "nvfp4"])
def test_drafts_do_not_change_what_is_said(tmp_path: Path, form: str) -> None:
    folder, _ = write(tmp_path / "m", form)
    asks = [Ask(tuple(range(i, i + 5)), SamplingParams(max_tokens=16, temperature=0.0)) for i in range(3)]
    said = []
    for drafter in (NoDrafter(), NgramDrafter(nodes=6, branches=2)):
        runner = ModelRunner.load(open_checkpoint(folder), torch.float32, CPU, 200, 4)
        said.append(generated(Harness(runner, drafter, LAWS["match"]()).run(asks)))
    assert said[0] == said[1]


def test_blocks_of_128_may_end_within_the_matrix() -> None:
    """As in FP8 checkpoints whose sizes are no multiples of 128."""
    codes = torch.randn(200, 320, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = scales_for((2, 3), torch.float32, 0.1)
    stored = {"x.weight": codes, "x.weight_scale_inv": scale}
    scaled = read_scaled(Scheme("fp8"), stored.get, "x.weight", (200, 320))
    assert scaled is not None
    assert scaled.numbers()[199, 319] == codes[199, 319].float() * scale[1, 2]
    assert scaled.numbers()[127, 128] == codes[127, 128].float() * scale[0, 1]


def test_tables_are_those_of_the_formats() -> None:
    """NF4: quantiles of a normal distribution, one more above zero than below."""
    ends = (
        [1 - (1 / 32 + 1 / 30) / 2 - i * 0.4677083 / 8 for i in range(8)],
        [0.9677083 - i * 0.4677083 / 7 for i in range(7)],
    )
    above, below = ([NormalDist().inv_cdf(p) for p in side] for side in ends)
    wanted = torch.tensor(sorted([*(-q for q in below), 0.0, *above])) / above[0]
    torch.testing.assert_close(TABLES["NF4"], wanted, rtol=0, atol=1e-5)
    assert TABLES["FP4"][:8].tolist() == pytest.approx([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])


def test_every_8_bit_float_is_decoded(tmp_path: Path) -> None:
    library = kernels()
    if library is None:
        pytest.skip("no kernels here")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
    stored = {"x.weight": codes, "x.weight_scale": torch.tensor([0.37])}
    scaled = read_scaled(Scheme("fp8"), stored.get, "x.weight", (8, 32))
    assert scaled is not None
    blocks = scaled.blocks()
    assert blocks is not None
    assert torch.equal(blocks.numbers(library).nan_to_num(99), scaled.numbers().nan_to_num(99))


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"quant_method": "hqq"}, r"HQQ.*not read yet.*--weights int8 or int4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size"),
        (ct("mxfp4-pack-quantized"), "mxfp4"),
        ({**ct("dense"), "sparsity_config": {"format": "sparse-bitmask"}}, "compressed-tensors"),
        ([1, 2], "list"),
        ({"quant_method": ["awq"]}, "quantised with"),
    ],
)
def test_what_is_not_read_is_refused_with_advice(tmp_path: Path, stated: object, reason: str) -> None:
    folder, _ = write(tmp_path / "m", "awq")
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, "quantization_config": stated}))
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(folder)


STEM = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("form", "part", "change"),
    [
        ("awq", "scales", None),
        ("awq", "qzeros", lambda t: t[:-1]),
        ("awq", "qweight", lambda t: t[:, :-1].contiguous()),
        ("awq", "qweight", lambda t: t.float()),
        ("awq", "scales", lambda t: t[:0]),
        ("gptq", "g_idx", lambda t: t + 1000),
        ("gptq", "g_idx", lambda t: t - 1),
        ("gptq", "g_idx", lambda t: t[:-1]),
        ("gptq", "g_idx", lambda t: t.float()),
        ("gptq", "scales", lambda t: t[:0]),
        ("gptq", "qweight", lambda t: t.view(-1)),
        ("nvfp4", "weight_scale_2", None),
        ("nvfp4", "weight_scale_2", lambda t: torch.ones(3)),
        ("nvfp4", "weight_scale", lambda t: t[:, :1].contiguous()),
        ("nvfp4", "weight_scale", lambda t: t.float()),
        ("nvfp4", "weight", lambda t: t[:, :-1].contiguous()),
        ("w4a16", "weight_scale", None),
        ("w4a16", "weight_scale", lambda t: t[:, :0].contiguous()),
        ("w4a16", "weight_scale", lambda t: t[:1].contiguous()),
        ("w4a16", "weight_packed", lambda t: t[:, :3].contiguous()),
        ("w4a16-asym", "weight_zero_point", lambda t: t[:1].contiguous()),
        ("bnb-nf4", "weight", lambda t: t[:-1].contiguous()),
        ("bnb-nf4", "weight.absmax", lambda t: t[:-1].contiguous()),
        ("bnb-nf4", "weight.nested_quant_map", None),
        ("bnb-nf4", "weight.nested_absmax", lambda t: t[:-1].contiguous()),
        ("bnb-nf4", "weight.quant_map", lambda t: t.half()),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:-1].contiguous()),
        ("bnb-nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: torch.tensor(list(b"{}"), dtype=torch.uint8)),
        ("bnb-int8", "SCB", None),
        ("bnb-int8", "SCB", lambda t: t[:-1].contiguous()),
        ("w8a8-int8", "weight_scale", lambda t: t[:3].contiguous()),
        ("w8a8-int8", "weight", lambda t: t[:, :-1].contiguous()),
        ("fp8-blocks", "weight_scale_inv", lambda t: t[:1].contiguous()),
        ("fp8-tensor", "weight_scale", lambda t: t.expand(5).contiguous()),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, form: str, part: str, change: Callable[[Tensor], Tensor] | None
) -> None:
    folder, _ = write(tmp_path / "m", form)
    stored = load_file(folder / "model.safetensors")
    whole = stored.pop(f"{STEM}.{part}")
    if change is not None:
        stored[f"{STEM}.{part}"] = change(whole)
    save_file(stored, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    for read in (checkpoint.tensor, checkpoint.blocks):
        with pytest.raises(CheckpointError, match=r"down_proj.*(lacks|belongs|shape)"):
            read(f"{STEM}.weight")


def test_float16_folders_stay_in_16_bits(write_folder: Callable[..., tuple[Path, Tensors]]) -> None:
    library = kernels()
    if library is None:
        pytest.skip("no kernels here")
    folder, tensors = write_folder()
    save_file({name: tensor.half() for name, tensor in tensors.items()}, folder / "model.safetensors")
    model = NativeTransformer(library, open_checkpoint(folder), FORMATS["stored"])
    assert model._model.head.storage == Storage.BLOCKS
    native, torchs = runner_of(model), runner_of(Transformer(open_checkpoint(folder), torch.float64, CPU))
    alone, want = logits(native, [1, 2, 3, 4, 5], always(1)), logits(torchs, [1, 2, 3, 4, 5], always(8))
    assert float((alone - want).abs().max() / want.abs().max()) < 1e-5
    assert torch.equal(logits(native, [1, 2, 3, 4, 5], always(8)), alone)
