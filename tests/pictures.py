"""Tiny models that see images, as transformers makes and saves them, and images for them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.vision import Seen, VisionTower
from tiny import save_tokenizer

VOCABULARY, IMAGE = 13, 12  # and the image token
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN_EYE: dict[str, Any] = {
    "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "intermediate_size": 24,
    "window_size": 16, "fullatt_block_indexes": [0],
}  # fmt: skip
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 11, "vision_start_token_id": 10, "vision_end_token_id": 9}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 16,
        },
        "image_token_id": IMAGE,
        "image_seq_length": 16,
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE}, "vision_config": _QWEN_EYE, **_TOKENS,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "text_config": {
            **_TEXT, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        },
        "mm_tokens_per_image": 4, "boi_token_index": 10, "eoi_token_index": 9, "image_token_index": IMAGE,
        "tie_word_embeddings": False,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE}, "vision_config": _QWEN_EYE, **_TOKENS,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
_PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
    },
    "qwen2_vl": {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
}  # fmt: skip
_PROCESSORS["gemma3"] = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}}
_PROCESSORS["qwen2_5_vl"] = _PROCESSORS["qwen2_vl"]
SIZES = [(16, 16), (24, 16), (16, 32)]  # widths and heights of the images


def image(i: int, kind: str = "PNG") -> bytes:
    """A file with coloured noise."""
    width, height = SIZES[i % len(SIZES)]
    generator = torch.Generator().manual_seed(i)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, kind)
    return file.getvalue()


def model_of(name: str, folder: Path, vocabulary: int = VOCABULARY, token: int = IMAGE) -> Any:
    """A model with sharp random weights in float64, saved to a folder with its image processor."""
    stated = {**CONFIGS[name], **_image_tokens(name, token)}
    stated["text_config"] = {**stated["text_config"], "vocab_size": vocabulary, "eos_token_id": None}
    config = AutoConfig.for_model(name, **stated)
    torch.manual_seed(1)
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").double().eval()
    generator = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        spread = 0.2 if weight.dim() == 1 else 1.3 * weight[0].numel() ** -0.5
        with torch.no_grad():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(weight * (weight.dim() == 1) + spread * noise)
    with torch.no_grad():
        model.lm_head.weight[token] = 0  # seldom says an image token
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[name]))
    return model


def _image_tokens(name: str, token: int) -> dict[str, int]:
    """Entries of a configuration, where `token` stands for a piece and what frames an image comes before it."""
    if "boi_token_index" not in CONFIGS[name]:
        return {"image_token_id": token}
    return {"image_token_index": token, "eoi_token_index": token - 1, "boi_token_index": token - 2}


def seeing_folder(path: Path, name: str) -> Path:
    """A folder that reads and writes bytes and sees images where its chat template puts them."""
    vocabulary = save_tokenizer(path, special=("<|end|>", "<begin>", "<finish>", "<image>"))
    model_of(name, path, vocabulary, vocabulary - 1)
    mark = "<begin>" if "boi_token_index" in CONFIGS[name] else "<image>"
    content = "{% for p in m.content %}{% if p.type == 'image' %}" + mark
    content += "{% else %}{{ p.text }}{% endif %}{% endfor %}"
    either = "{% if m.content is string %}{{ m.content }}{% else %}" + content + "{% endif %}"
    template = "{% for m in messages %}{{ m.role }}: " + either + "\n{% endfor %}assistant:"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|end|>"}))
    return path


def seen_by(folder: Path, numbers: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Seen]:
    """What a model makes of images."""
    spec = open_checkpoint(folder).config.images
    assert spec is not None
    tower = VisionTower(folder, spec, dtype)
    return [tower.see(image(i)) for i in numbers]


def data_url(file: bytes, kind: str = "png") -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(file).decode()}"}}
