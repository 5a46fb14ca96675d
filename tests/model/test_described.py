"""What a model will need is told from its headers, and is true."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.model.checkpoint import files_of, open_checkpoint
from draftwood.model.described import held_formats
from draftwood.model.native import NativeTransformer
from draftwood.model.row_file import embedding_file
from draftwood.model.weights import FORMATS
from draftwood.ops.native import kernels

from .test_blocks import MIXTURES, write_model
from .test_quantised import write


@pytest.mark.parametrize("form", ["Q4_K_M", "Q4_0 beside Q8_0", "F16", "awq", "bnb-nf4", "w8a8-int8", "fp8-tensor"])
def test_memory_is_what_was_foretold(tmp_path: Path, form: str) -> None:
    library = kernels()
    if library is None:
        pytest.skip("no kernels here")
    path = write_model(tmp_path / "m.gguf", MIXTURES[form]) if form in MIXTURES else write(tmp_path / "m", form)[0]
    checkpoint = open_checkpoint(path)
    looked_up = embedding_file(checkpoint)
    foretold = sum(held.loaded for held in held_formats(files_of(checkpoint)))
    foretold -= 0 if looked_up is None else looked_up.num_bytes
    assert NativeTransformer(library, checkpoint, FORMATS["stored"]).num_bytes == pytest.approx(foretold, rel=0.25)


def test_a_model_is_described_without_being_loaded(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", {**MIXTURES["Q4_K_M"], "ffn_up": "TQ2_0"})
    result = CliRunner().invoke(app, ["models", str(path)])
    assert result.exit_code == 0
    said = " ".join(result.output.split())
    assert "2 matrices in TQ2_0" in said
    assert "dequantised to float32" in said
    assert "Q6_K" in said
    assert "tokens of cache" in said
    assert "stays in its file" in said


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["models", str(tmp_path / "none.gguf")])
    assert result.exit_code != 0
