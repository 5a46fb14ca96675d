from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from draftwood.errors import CheckpointError
from draftwood.model import store
from draftwood.model.checkpoint import expected_shape, files_of, open_checkpoint
from draftwood.model.families import FAMILIES
from draftwood.model.row_file import RowFileSource
from draftwood.ops.native import kernels

from .conftest import hf_tensors

Write = Callable[..., tuple[Path, dict[str, torch.Tensor]]]


@pytest.mark.parametrize("shards", [1, 3])
def test_folder_gives_back_what_was_saved(write_folder: Write, shards: int) -> None:
    folder, tensors = write_folder(shards=shards)
    checkpoint = open_checkpoint(folder)
    for name, tensor in tensors.items():
        assert checkpoint.has(name)
        assert torch.equal(checkpoint.tensor(name), tensor)
    assert not checkpoint.has("model.layers.9.mlp.up_proj.weight")


def test_checkpoints_know_their_files(write_folder: Write, write_gguf: Write) -> None:
    folder, _ = write_folder(shards=3)
    file, _ = write_gguf("llama")
    assert files_of(open_checkpoint(folder)) == sorted(folder.glob("*.safetensors"))
    assert len(files_of(open_checkpoint(folder))) == 3
    assert files_of(open_checkpoint(file)) == [file]


def test_stored_types_are_kept(write_folder: Write) -> None:
    folder, tensors = write_folder()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert open_checkpoint(folder).tensor("model.norm.weight").dtype == torch.bfloat16


def test_tied_head_is_not_a_tensor_of_its_own(write_folder: Write) -> None:
    folder, _ = write_folder(tie_word_embeddings=True)
    assert not open_checkpoint(folder).has("lm_head.weight")


def test_end_tokens_of_generation_config_count(write_folder: Write) -> None:
    folder, _ = write_folder()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert open_checkpoint(folder).config.eos_token_ids == (2, 5, 7)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_gives_tensors_in_hugging_face_layout(write_gguf: Write, architecture: str) -> None:
    """Llama files interleave the rows of q and k, Qwen's do not; biases come along."""
    path, tensors = write_gguf(architecture)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.family == architecture
    assert checkpoint.config.qkv_bias == (architecture == "qwen2")
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 2e-3), ("Q8_0", 0.03), ("Q4_0", 0.6)])
def test_quantised_gguf_stays_near_the_original(write_gguf: Write, kind: str, tolerance: float) -> None:
    path, tensors = write_gguf("llama", GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    value = checkpoint.tensor(name)
    assert value.dtype == (torch.float16 if kind == "F16" else torch.float32)
    assert (value.float() - tensors[name]).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_read_where_they_lie(write_folder: Write, dtype: torch.dtype) -> None:
    library = kernels()
    if library is None:
        pytest.skip("no kernels here")
    folder, tensors = write_folder()
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    checkpoint, rows = open_checkpoint(folder), torch.tensor([39, 0, 7, 7])
    assert isinstance(checkpoint, RowFileSource)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found = checkpoint.row_file(name)
        assert found is not None
        assert torch.equal(found.numbers(library, rows, None), tensors[name].to(dtype).float()[rows])


def test_gguf_without_output_is_tied(write_gguf: Write) -> None:
    path, _ = write_gguf(head=False)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.tied_head
    assert not checkpoint.has("lm_head.weight")
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        checkpoint.tensor("lm_head.weight")


def test_gguf_of_wrong_shape_is_refused(write_gguf: Write) -> None:
    path, _ = write_gguf(extra=lambda writer: writer.add_vocab_size(41))
    with pytest.raises(CheckpointError, match=r"shape \(40, 64\) where the configuration says \(41, 64\)"):
        open_checkpoint(path).tensor("model.embed_tokens.weight")


def test_part_of_a_split_gguf_is_refused(write_gguf: Write) -> None:
    path, _ = write_gguf(extra=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(CheckpointError, match="join the parts"):
        open_checkpoint(path)


def test_gguf_llama3_factors_are_read_from_their_tensor(write_gguf: Write) -> None:
    factors = [1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]

    def extra(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", torch.tensor(factors).numpy())

    path, _ = write_gguf(extra=extra)
    assert open_checkpoint(path).config.rope.long_factor == tuple(factors)


def test_every_name_has_a_shape_and_a_gguf_name(write_folder: Write) -> None:
    folder, tensors = write_folder(attention_bias=True)
    config = open_checkpoint(folder).config
    form = FAMILIES[config.family].gguf
    assert form is not None
    for name, tensor in tensors.items():
        assert expected_shape(name, config) == tuple(tensor.shape)
        assert form.place(name, config) is not None
    assert expected_shape("model.layers.0.self_attn.k_proj.bias", config) == (32,)
    assert expected_shape("model.layers.0.self_attn.q_norm.weight", config) == (16,)
    assert expected_shape("unheard.of", config) is None


def test_folder_without_config_is_refused_and_a_gguf_in_it_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    with pytest.raises(CheckpointError, match=r"no config\.json.*to run x\.gguf"):
        open_checkpoint(tmp_path)


def test_pickles_are_refused_with_the_way_out(write_folder: Write) -> None:
    folder, _ = write_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model\.bin\).*Convert them to safetensors"):
        open_checkpoint(folder)


def test_folder_without_weights_is_refused(write_folder: Write) -> None:
    folder, _ = write_folder()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        open_checkpoint(folder)


def test_missing_shard_is_named(write_folder: Write) -> None:
    folder, _ = write_folder(shards=3)
    (folder / "model-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of its 3 weight files: model-00001\.safetensors"):
        open_checkpoint(folder)


def test_index_may_not_point_outside(write_folder: Write) -> None:
    folder, _ = write_folder(shards=2)
    index = {"weight_map": {"lm_head.weight": "../../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="points outside"):
        open_checkpoint(folder)


def test_index_that_promises_an_absent_tensor_is_refused(write_folder: Write) -> None:
    folder, tensors = write_folder(shards=2)
    shard = folder / "model-00000.safetensors"
    name = next(iter(tensors))
    save_file({key: value for key, value in load_file(shard).items() if key != name}, shard)
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        open_checkpoint(folder).tensor(name)


@pytest.mark.parametrize("size", [0, 5, 200, -10])
def test_truncated_safetensors_are_refused(write_folder: Write, size: int) -> None:
    folder, _ = write_folder()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or truncated"):
        open_checkpoint(folder)


def test_wrong_shape_is_refused_when_read(write_folder: Write) -> None:
    folder, _ = write_folder(vocab_size=41)
    with pytest.raises(CheckpointError, match="do not belong together"):
        open_checkpoint(folder).tensor("model.embed_tokens.weight")


def test_missing_head_is_noticed_on_opening(write_folder: Write) -> None:
    folder, _ = write_folder()
    save_file(hf_tensors(head=False), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        open_checkpoint(folder)


def test_integer_weights_are_refused(write_folder: Write) -> None:
    folder, tensors = write_folder()
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"torch\.int8"):
        open_checkpoint(folder).tensor("model.norm.weight")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_config_is_refused(write_folder: Write, content: str) -> None:
    folder, _ = write_folder()
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_weight_file_alone_is_refused(write_folder: Write) -> None:
    folder, _ = write_folder()
    with pytest.raises(CheckpointError, match="give the folder"):
        open_checkpoint(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no model file we can read"):
        open_checkpoint(folder / "config.json")


@pytest.mark.parametrize("name", ["nonesuch", "./org/name", "a/b/c", "folder/file.gguf"])
def test_unknown_names_list_what_there_is(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"alias \(smollm2\)"):
        open_checkpoint(name)


def test_hub_ids_are_fetched_without_pickles(write_folder: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = write_folder()
    asked = {}

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert open_checkpoint("org/name").name == "org/name"
    assert "*.safetensors" in asked["org/name"]
    assert not any("bin" in pattern for pattern in asked["org/name"])


def test_unreachable_hub_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=r"cannot be reached \(no connection\)"):
        open_checkpoint("org/name")


def test_a_full_disk_is_said_and_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "blobs/x")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=r"the disk is full \(blobs/x\).*HF_HOME.*complete are kept") as refused:
        open_checkpoint("org/name")
    assert "Errno" not in str(refused.value)


def test_alias_opens_the_fetched_file(write_gguf: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_gguf()
    monkeypatch.setattr(store, "fetch", lambda alias: path)
    assert open_checkpoint("smollm2").name == "smollm2"


@pytest.mark.slow
def test_embedded_model_opens_whole() -> None:
    checkpoint = open_checkpoint("smollm2")
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.tied_head
    assert checkpoint.tensor("model.embed_tokens.weight").shape == (49152, 576)
    for layer in range(config.num_layers):
        assert checkpoint.has(f"model.layers.{layer}.mlp.down_proj.weight")
