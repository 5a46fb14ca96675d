"""Images for a model that sees them: transformers' own vision tower, run once for each image of a prompt.

What the tower makes of an image are embeddings, one for each image token; from there on rows are rows. Only the tower
and its projector are loaded, with transformers' own classes; nothing in a folder is executed, and nothing is fetched.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..batch import Images
from ..errors import CheckpointError, InvalidRequest
from .files import read_object
from .spec import ImageSpec
from .universal_folder import readable, require_transformers

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 << 20  # of one image, before it is resized
KEPT = 32  # images whose embeddings are kept for the next request with them


@dataclass(frozen=True, eq=False)
class Seen:
    """What the tower makes of one image."""

    key: str
    embeds: Tensor  # [n, hidden]
    grid: tuple[int, int] | None  # rows and columns of its tokens, where rotation goes by them


class VisionTower:
    """Reads images."""

    def __init__(self, folder: Path, spec: ImageSpec, dtype: torch.dtype) -> None:
        require_transformers("This model sees images by transformers' own modules")
        self.spec = spec
        self._dtype = dtype
        self._model = _tower(folder, dtype)
        self._processor = _processor(folder)
        self._known: OrderedDict[str, Seen] = OrderedDict()
        self._lock = threading.Lock()  # requests are prepared by several threads

    def see(self, image: bytes) -> Seen:
        """The embeddings of a file's image."""
        key = hashlib.blake2b(image, digest_size=32).hexdigest()
        with self._lock:
            if key not in self._known:
                self._known[key] = self._look(key, image)
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]

    def _look(self, key: str, image: bytes) -> Seen:
        made = self._processor(images=[_opened(image)], return_tensors="pt")
        given = {name: made[name] for name in ("pixel_values", "image_grid_thw") if name in made}
        given["pixel_values"] = given["pixel_values"].to(self._dtype)
        with torch.inference_mode():
            found = self._model.get_image_features(**given)
        parts = getattr(found, "pooler_output", found)
        embeds = torch.cat([part.flatten(0, -2) for part in parts]).clone()
        grid = given.get("image_grid_thw")
        return Seen(key, embeds, None if grid is None else self._tokens_of(grid[0].tolist()))

    def _tokens_of(self, grid: Sequence[int]) -> tuple[int, int]:
        _, height, width = grid
        merged = self._model.config.vision_config.spatial_merge_size
        return height // merged, width // merged


def placed(tokens: Sequence[int], seen: Sequence[Seen], spec: ImageSpec) -> tuple[list[int], Images]:
    """A prompt with one image token for each image, as the model reads it: with as many as the images have pieces."""
    count = sum(token == spec.token for token in tokens)
    if count != len(seen):
        raise InvalidRequest(
            f"The prompt has places for {count} images and comes with {len(seen)}: the model's chat template makes "
            "them, so leave image markers out of texts."
        )
    if not tokens or tokens[-1] == spec.token:
        raise InvalidRequest("The prompt ends with an image: put some text behind it.")
    spread: list[int] = []
    rows: list[int] = []
    turns: list[Tensor] = []
    left, position = iter(seen), 0
    for token in tokens:
        if token != spec.token:
            spread.append(token)
            turns.append(torch.full((3, 1), position))
            position += 1
            continue
        image = next(left)
        rows += range(len(spread), len(spread) + len(image.embeds))
        spread += [token] * len(image.embeds)
        own, size = _turns_of(image)
        turns.append(own + position)
        position += size
    by_rows = any(image.grid is not None for image in seen)
    ends = list(itertools.accumulate((len(image.embeds) for image in seen), initial=0)) if spec.sees_ahead else []
    blocks = tuple((rows[start], rows[end - 1] + 1) for start, end in itertools.pairwise(ends))
    key = hashlib.blake2b(" ".join(image.key for image in seen).encode(), digest_size=32).hexdigest()
    return spread, Images(
        torch.tensor(rows), torch.cat([image.embeds for image in seen]), torch.cat(turns, 1) if by_rows else None,
        position - len(spread) if by_rows else 0, key, blocks,
    )  # fmt: skip


def _turns_of(image: Seen) -> tuple[Tensor, int]:
    """Time, height and width of its tokens from where it begins, and how far on the next token is. [3, n]."""
    if image.grid is None:
        count = len(image.embeds)
        return torch.arange(count).expand(3, -1), count
    height, width = image.grid
    down, across = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(down), down, across]).flatten(1), max(height, width)


def _opened(image: bytes) -> Any:
    """A file's image in red, green and blue; refused where it is none, or too large."""
    from PIL import Image

    try:
        opened = Image.open(io.BytesIO(image), formats=FORMATS)
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise InvalidRequest(f"An image has {width} x {height} pixels; at most {MAX_PIXELS:,} are read. Send less.")
        return opened.convert("RGB")
    except InvalidRequest:
        raise
    except Exception as error:  # the library raises whatever a damaged file leads to
        raise InvalidRequest(f"An image cannot be read ({error}); {', '.join(FORMATS)} are.") from error


def _tower(folder: Path, dtype: torch.dtype) -> Any:
    """Everything of transformers' model but its decoder, which ours is."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
    from transformers.utils import logging

    stated = readable(folder, read_object(folder / "config.json"))
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # it would name every tensor of the decoder, which is left out on purpose
    try:
        config = CONFIG_MAPPING[str(stated["model_type"])].from_dict(stated)
        text = config.get_text_config()
        text.num_hidden_layers, text.layer_types = 0, []
        model: Any = AutoModelForImageTextToText.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:
        raise CheckpointError(f"The vision tower in {folder} cannot be read: {error!s:.300}") from error
    finally:
        logging.set_verbosity(before)
    inner = model.model.eval()
    del inner.language_model  # the embeddings of tokens: ours are used
    return inner


def _processor(folder: Path) -> Any:
    try:
        from transformers import AutoImageProcessor

        made = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False, backend="pil")
        if made.to_dict().get("do_pan_and_scan"):
            raise ValueError("it cuts images into several (do_pan_and_scan), which is not known here")
        return made
    except Exception as error:
        raise CheckpointError(
            f"The images of {folder} cannot be prepared ({error!s:.300}). It needs Pillow (pip install "
            "'draftwood[vision]') and the model's preprocessor_config.json."
        ) from error
