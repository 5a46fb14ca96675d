"""Images in conversations: OpenAI's content parts, checked, and what the model's vision tower makes of them."""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftwood.batch import Images
from draftwood.errors import CheckpointError, InvalidRequest
from draftwood.model.checkpoint import Checkpoint, SafetensorsCheckpoint
from draftwood.model.tokenizer import Tokenizer
from draftwood.model.vision import VisionTower, placed

log = logging.getLogger(__name__)

MAX_IMAGES = 64  # of one request
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """A conversation that is rendered already, and the files of its images."""

    tokens: list[int]  # with one image token for each
    files: Sequence[bytes] = ()


@dataclass(frozen=True)
class ImageReader:
    """What reads a request's images; the tower is None where the model sees none."""

    tower: VisionTower | None
    missing: str = "This model sees no images here: send text, or load one that does, on a CPU."

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> ImageReader:
        """For a model, loaded with it."""
        spec = checkpoint.config.images
        if spec is None or not isinstance(checkpoint, SafetensorsCheckpoint) or device.type != "cpu":
            return cls(None)
        try:
            return cls(VisionTower(checkpoint.folder, spec, dtype))
        except CheckpointError as error:  # its text can be had all the same
            log.warning("Images are refused: %s", error)
            return cls(None, str(error))

    def apart(self, messages: Messages) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Messages as chat templates want them, and the files of their images."""
        files: list[bytes] = []
        said = [{**message, "content": self.content(message.get("content"), files)} for message in messages]
        return said, files

    def framed(self, text: str, files: Sequence[bytes], tokenizer: Tokenizer) -> str:
        """A rendered conversation with an image token for each image, where templates write what comes before it."""
        if not files or self.tower is None or self.tower.spec.frame is None:
            return text
        begin, end, piece = (
            tokenizer.piece(token, skip_special=False).decode()
            for token in (*self.tower.spec.frame, self.tower.spec.token)
        )
        return text.replace(begin, f"\n\n{begin}{piece}{end}\n\n")

    def place(self, tokens: list[int], files: Sequence[bytes]) -> tuple[list[int], Images | None]:
        """A prompt with its images where the template has left one token for each."""
        if not files or self.tower is None:
            return tokens, None
        return placed(tokens, [self.tower.see(file) for file in files], self.tower.spec)

    def content(self, content: object, files: list[bytes]) -> object:
        """A message's content as templates want it; the files of its images are added to `files`."""
        if not isinstance(content, list | tuple):
            return content
        parts = [self._part(part, files) for part in content]
        if any(part["type"] == "image" for part in parts):
            return parts
        return "".join(part["text"] for part in parts)  # what templates of text models know

    def _part(self, part: object, files: list[bytes]) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if isinstance(part, Mapping) and kind == "image_url":
            if self.tower is None:
                raise InvalidRequest(self.missing)
            if len(files) >= MAX_IMAGES:
                raise InvalidRequest(f"A conversation has at most {MAX_IMAGES} images.")
            files.append(_file_of(part.get("image_url")))
            return {"type": "image"}
        raise InvalidRequest(f"A part of a message is a text or an image_url, not {kind!r:.50}.")


def _file_of(given: object) -> bytes:
    """The bytes of a data URL; nothing is fetched from anywhere."""
    url = given.get("url") if isinstance(given, Mapping) else given
    head = _DATA_URL.match(url) if isinstance(url, str) else None
    if head is None or not isinstance(url, str):
        raise InvalidRequest(
            "An image_url has to be a data URL (data:image/png;base64,…): images are not fetched from other places."
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"The data of an image_url is not base64: {error}.") from error
