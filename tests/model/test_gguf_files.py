"""Files that llama.cpp's converter has written, of every family, give the logits that transformers gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood.errors import CheckpointError
from draftwood.model.checkpoint import GgufCheckpoint
from draftwood.model.families import FAMILIES
from draftwood.model.native import NativeTransformer
from draftwood.model.runner import ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS
from draftwood.ops.native import kernels
from tiny import CPU

from .test_native import in_chunks, same

FOLDER = Path(__file__).parent / "gguf_files"
TEXT = [5, 3, 9, 12, 0, 1, 1, 7, 8, 2, 11, 4, 6, 10]
LOGITS = np.load(FOLDER / "logits.npz")
NAMES = sorted(LOGITS.files)


def logits_of(model: object) -> torch.Tensor:
    return in_chunks(ModelRunner(model, num_pages=20, page_size=4), TEXT, same(100))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    want = torch.from_numpy(LOGITS[name]).double()
    got = logits_of(Transformer(GgufCheckpoint(FOLDER / f"{name}.gguf"), torch.float64, CPU))
    assert (got - want).abs().max() <= 3e-5 * float(want.abs().max())


@pytest.mark.parametrize("weights", ["stored", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_multiply_the_blocks_of_the_file(name: str, weights: str) -> None:
    library = kernels()
    if library is None:
        pytest.skip("no kernels here")
    checkpoint = GgufCheckpoint(FOLDER / f"{name}.gguf")
    want = logits_of(Transformer(checkpoint, torch.float64, CPU, FORMATS[weights]))
    got = logits_of(NativeTransformer(library, checkpoint, FORMATS[weights]))
    assert (got.double() - want).abs().max() <= 5e-5 * max(1.0, float(want.abs().max()))


def test_every_family_with_a_form_in_gguf_has_a_file() -> None:
    read = {GgufCheckpoint(FOLDER / f"{name}.gguf").config.family for name in NAMES}
    stated = {name for name, family in FAMILIES.items() if family.gguf is not None}
    # Gemma 3's converter wants a vocabulary, and its file is written by hand in test_families; Mistral's is Llama's
    # with a window; what the converter writes for GLM (not GLM-4) has another eps than the model.
    assert stated - read == {"gemma3_text", "mistral", "glm"}


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_a_tensor_that_is_missing_is_named(name: str) -> None:
    checkpoint = GgufCheckpoint(FOLDER / f"{name}.gguf")
    with pytest.raises(CheckpointError, match=r"has no tensor model.layers.7.self_attn.q_proj.weight"):
        checkpoint.tensor("model.layers.7.self_attn.q_proj.weight")
