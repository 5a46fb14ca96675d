"""A student as we export it: the layers of a language model, whose words are its target's."""

from __future__ import annotations

import torch

from draftwood.model.checkpoint import Checkpoint, expected_shape
from draftwood.model.config import ModelConfig
from draftwood.model.rope import refusing_malformed
from draftwood.nets.layouts.common import misfit, refused
from draftwood.nets.layouts.files import DrafterFiles
from draftwood.nets.shared import SHARED, SharedWords
from draftwood.nets.student import MaskedStudent, Student


def student_words(files: DrafterFiles, target: Checkpoint) -> SharedWords:
    """The whole model: layers from the files, embedding and head from the target."""
    with refusing_malformed(f"the config.json of {files.name}"):
        return _student_words(files, target)


def _student_words(files: DrafterFiles, target: Checkpoint) -> SharedWords:
    config = ModelConfig.from_hf(files.config)
    for what in ("hidden_size", "vocab_size", "tied_head"):
        theirs, own = getattr(target.config, what), getattr(config, what)
        if own != theirs:
            raise misfit(files, f"its {what} is {own} and the target's {theirs}")
    own = {name: files.read(name) for name in files.shapes if name not in SHARED}
    for name, value in own.items():
        expected = expected_shape(name, config)
        if expected is None or tuple(value.shape) != expected:
            raise refused(files, f"{name} has shape {tuple(value.shape)}, where its configuration says {expected}")
        if not value.isfinite().all():
            raise refused(files, f"{name} holds numbers that are NaN or infinite")
    return SharedWords(files.name, config, own, target)


def student_net(files: DrafterFiles, target: Checkpoint) -> Student:
    """Its layers alone, as they were trained."""
    words = student_words(files, target)
    mask, guesses = files.config.get("pard_token"), (files.config.get("draftwood") or {}).get("guesses", 1)
    net = Student(words.config) if mask is None else MaskedStudent(words.config, mask, guesses)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(words.tensor(name))
    return net
