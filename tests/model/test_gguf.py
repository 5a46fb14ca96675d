from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize

from draftwood.errors import CheckpointError
from draftwood.model.gguf import read_gguf

Write = Callable[..., tuple[Path, dict]]
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_bit_for_bit_those_of_the_gguf_package(write_gguf: Write, kind: str) -> None:
    path, _ = write_gguf("qwen2", GGMLQuantizationType[kind])
    file = read_gguf(path)
    for tensor in GGUFReader(path).tensors:
        expected = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type))
        ours = file.dequantize(file.tensors[tensor.name])
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert ours.dtype == np.float32
        assert ours.tobytes() == expected.tobytes(), tensor.name


def test_fields_are_plain_values(write_gguf: Write) -> None:
    def extra(writer: GGUFWriter) -> None:
        writer.add_bool("x.flag", True)
        writer.add_float32("x.real", 0.5)
        writer.add_int64("x.big", -(2**40))
        writer.add_array("x.words", ["a", "", "é"])
        writer.add_array("x.numbers", [3, 1, 2])

    path, _ = write_gguf(extra=extra)
    fields = read_gguf(path).fields
    assert fields["general.architecture"] == "llama"
    assert fields["x.flag"] is True
    assert fields["x.real"] == 0.5
    assert fields["x.big"] == -(2**40)
    assert fields["x.words"] == ["a", "", "é"]
    assert fields["x.numbers"] == [3, 1, 2]


def test_a_file_cut_anywhere_is_refused(write_gguf: Write, tmp_path: Path) -> None:
    """Each read of the header is bounds-checked: no cut may end in struct.error or a silent short tensor."""
    path, _ = write_gguf(kind=GGMLQuantizationType.Q4_0)
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    header_ends = min(len(whole), 3000)
    for size in [*range(0, header_ends, 7), len(whole) // 2, len(whole) - 64]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"truncated|empty|GGUF"):
            read_gguf(cut)


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (b"PK\x03\x04" + bytes(40), "does not start with"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + b"x", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sI", 1, b"t", 9), "9 dimensions"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 999, 0),
            "type 999",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 33, 8, 0),
            "multiple of 32",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQQIQ", 1, b"t", 2, 2**32, 2**32, 0, 0),
            "trunc",
        ),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, start: bytes, reason: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(start)
    with pytest.raises(CheckpointError, match=reason):
        read_gguf(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be opened"):
        read_gguf(tmp_path / "none.gguf")


def test_a_type_without_dequantisation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "int.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 26, 0) + bytes(64))
    file = read_gguf(path)
    with pytest.raises(CheckpointError, match="I32, which cannot be dequantised"):
        file.dequantize(file.tensors["t"])
