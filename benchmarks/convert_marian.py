"""A folder of safetensors and tokenizer.json from a Marian model as it is published: a pickle and two .spm files.

The pickle is read once, tensors only (`torch.load(weights_only=True)`), and never again. The tokenizer segments as the
source's SentencePiece model does; pieces that only the target's knows can be read back.

    python benchmarks/convert_marian.py path/to/opus-mt-en-fr path/to/new-folder
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import MarianConfig, MarianMTModel

NEVER = -1000.0  # the score of pieces that the source's model does not know: what it knows is always likelier


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a protocol buffer's fields."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(kind)
        size = varint() if size is None else size
        yield number, data[at : at + size]
        at += size


def pieces_of(model: bytes) -> tuple[dict[str, float], bytes]:
    """Scores of a SentencePiece model's pieces, and its table of normalised characters."""
    scores, table = {}, b""
    for number, value in fields(model):
        if number == 1 and isinstance(value, bytes):
            piece = dict(fields(value))
            text, score = piece[1], piece.get(2, b"\0\0\0\0")
            assert isinstance(text, bytes)
            assert isinstance(score, bytes)
            scores[text.decode()] = struct.unpack("<f", score)[0]
        if number == 3 and isinstance(value, bytes):
            table = bytes(dict(fields(value)).get(2, b""))  # type: ignore[arg-type]
    return scores, table


def tokenizer_of(folder: Path) -> Tokenizer:
    """The source's segmentation over the vocabulary of both."""
    ids = json.loads((folder / "vocab.json").read_text())
    scores, table = pieces_of((folder / "source.spm").read_bytes())
    ordered = sorted(ids, key=ids.__getitem__)
    backend = Tokenizer(models.Unigram([(piece, scores.get(piece, NEVER)) for piece in ordered], ids["<unk>"], False))
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    backend.normalizer = normalizers.Sequence([*([normalizers.Precompiled(table)] if table else []), spaces])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["</s>", "<unk>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", ids["</s>"])])
    return backend


def convert(folder: Path, out: Path) -> None:
    """Write `out`."""
    config = MarianConfig.from_pretrained(folder, trust_remote_code=False)
    model = MarianMTModel(config)
    weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    report = model.load_state_dict(weights, strict=False)
    strange = [name for name in report.missing_keys if "embed_positions" not in name and "lm_head" not in name]
    if strange or report.unexpected_keys:
        raise SystemExit(f"The weights do not fit: {strange[:3]} are missing, {report.unexpected_keys[:3]} unknown.")
    model.tie_weights()
    model.float().save_pretrained(out)
    tokenizer_of(folder).save(str(out / "tokenizer.json"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    convert(arguments.folder, arguments.out)
