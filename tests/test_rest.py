"""Datastores and drafts from them, against brute force; and what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from draftwood.assembly import check_datastores
from draftwood.cli.app import app
from draftwood.drafters import datastore
from draftwood.drafters.combined import CombinedDrafter
from draftwood.drafters.datastore import DEPTH, KIND, MANIFEST, Built, Datastore, Manifest, build
from draftwood.drafters.lookups import build_lookup
from draftwood.drafters.rest import RestDrafter
from draftwood.errors import CheckpointError, DraftwoodError, IncompatibleParts, InvalidRequest
from draftwood.model.tokenizer import Tokenizer
from draftwood.ops.native import kernels
from draftwood.ops.suffix_array import WIDEST, SuffixArray, sorted_places
from test_host_drafters import agree_with_parents, host_view, leaves, paths_of, proposal, proposed
from tiny import TinyCheckpoint, tiny_config, tiny_folder
from vocabularies import byte_level, with_byte_fallback

VOCAB = byte_level().vocab_size


def arrays(tokens: list[int], depth: int = 8) -> list[SuffixArray]:
    """With the kernels, where there are any, and without."""
    text = np.array(tokens, dtype=np.int32)
    made = [SuffixArray(text, sorted_places(text, depth), depth) for _ in range(2)]
    made[0]._kernels = None
    return made if kernels() is not None else made[:1]


@pytest.mark.parametrize("letters", [1, 2, 5, 100])
def test_places_are_sorted_by_what_begins_there(letters: int) -> None:
    rng = random.Random(letters)
    tokens = [rng.randrange(letters) for _ in range(200)]
    for depth in (1, 2, 8, 16):
        order = sorted_places(np.array(tokens, dtype=np.int32), depth).tolist()
        assert sorted(order) == list(range(200))
        begins = [tokens[place : place + depth] for place in order]
        assert begins == sorted(begins)


@pytest.mark.parametrize("letters", [1, 3, 100])
def test_ranges_hold_all_places_that_begin_alike_and_what_follows(letters: int) -> None:
    rng = random.Random(letters)
    tokens = [rng.randrange(letters) if rng.random() < 0.95 else -1 for _ in range(300)]
    for array in arrays(tokens):
        for _ in range(200):
            start, length = rng.randrange(290), rng.randrange(1, 8)
            piece = tokens[start : start + length]
            if -1 in piece:
                continue
            low, high = 0, len(tokens)
            for offset, token in enumerate(piece):
                low, high = array.narrow(low, high, offset, token)
            places = [i for i in range(300) if tokens[i : i + length] == piece]
            assert sorted(array.order[low:high].tolist()) == places
            after = Counter(tokens[i + length] for i in places if i + length < 300)
            first = dict(sorted((token, count) for token, count in after.items() if token >= 0)[:WIDEST])
            assert array.successors(low, high, length) == (first if length < array.depth else {})
            text = [rng.randrange(letters) for _ in range(rng.randrange(4))] + piece
            here = [
                n for n in range(1, min(8, len(text)) + 1) if any(tokens[i : i + n] == text[-n:] for i in range(300))
            ]
            found, low, high = array.longest_end(text, 1)
            assert found == max(here)
            assert sorted(array.order[low:high].tolist()) == [
                i for i in range(300) if tokens[i : i + found] == text[-found:]
            ]
            assert array.longest_end(text, found + 1) == (0, 0, 0)
        assert array.narrow(0, 300, array.depth, 0) == (0, 0)
        absent = array.narrow(0, 300, 0, 1000)
        assert absent[0] == absent[1]


def test_a_file_that_lies_about_places_reads_nothing_outside() -> None:
    text = np.array([1, 2, 3, 1], dtype=np.int32)
    for hostile in ([-5, 2**31 - 1, 10**9, 3], [3, 3, 3, 3], [-1, -1, -1, -1]):
        for with_kernels in (False, kernels() is not None):
            array = SuffixArray(text, np.array(hostile, dtype=np.int32), 8)
            if not with_kernels:
                array._kernels = None
            for offset in (0, 1, 7):
                array.narrow(0, 4, offset, 1)
                array.longest_end([1, 2, 3], 1)
                assert set(array.successors(0, 4, offset)) <= {1, 2, 3}
    with pytest.raises(ValueError, match="one place for each token"):
        SuffixArray(text, np.array([0], dtype=np.int32), 8)


def stored(folder: Path, *texts: str, tokenizer: Tokenizer | None = None) -> Built:
    files = []
    for number, text in enumerate(texts):
        files.append(folder.parent / f"{folder.name}-{number}.txt")
        files[-1].write_text(text)
    tokenizer = tokenizer or byte_level()
    return build(folder, files, tokenizer, tokenizer.vocab_size, lambda done, size: None)


def tokens_in(folder: Path) -> list[list[int]]:
    whole = [token for part in Datastore(folder).segments for token in part.tokens.tolist()]
    documents: list[list[int]] = [[]]
    for token in whole:
        if token < 0:
            documents.append([])
        else:
            documents[-1].append(token)
    return sorted(documents[:-1])


def encoded(text: str) -> list[int]:
    return byte_level().encode(text, special=False)


def test_files_are_added_once_and_changed_ones_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    assert stored(folder, "the cat", "the patch").added == 2
    assert stored(folder, "the cat", "the patch") == Built(0, 2, len(encoded("the cat") + encoded("the patch")) + 2)
    assert stored(folder, "the cat", "another", "then") == Built(2, 1, sum(map(len, tokens_in(folder))) + 4)
    assert tokens_in(folder) == sorted(map(encoded, ("the cat", "the patch", "another", "then")))
    assert len(Datastore(folder).segments) == 2
    (folder / "stray.safetensors.part").write_bytes(b"half a file")
    stored(folder, "the cat")
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def test_small_segments_are_merged_and_large_files_are_parted(tmp_path: Path) -> None:
    folder, texts = tmp_path / "store", [f"catch {i} the patch" for i in range(20)]
    with patch.object(datastore, "SEGMENT", 64), patch.object(datastore, "MOST_SEGMENTS", 3):
        for i in range(20):
            stored(folder, *texts[: i + 1])
        assert tokens_in(folder) == sorted(map(encoded, texts))
        assert all(len(part.tokens) <= 64 + 20 for part in Datastore(folder).segments)
        before = Datastore(folder).tokens
        stored(folder, "the other cat " * 100)
        assert Datastore(folder).tokens == before + len(encoded("the other cat " * 100)) + 1


def test_folders_json_lines_and_what_is_no_text(tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "inner").mkdir(parents=True)
    (files / "inner" / "a.py").write_text("the cat")
    (files / "b.jsonl").write_text(json.dumps({"turns": ["the", "then"], "n": 3}) + "\n\n" + json.dumps("catch") + "\n")
    (files / "c.bin").write_bytes(b"\xff\xfe\x00")
    built = build(tmp_path / "store", [files], byte_level(), VOCAB, lambda done, size: None)
    assert built.added == 3
    assert tokens_in(tmp_path / "store") == sorted([encoded("the cat"), encoded("the\nthen"), encoded("catch")])
    (files / "d.jsonl").write_text("{nonsense\n")
    for paths, words in (([files], "no JSON"), ([tmp_path / "nowhere"], "There is no file")):
        with pytest.raises(InvalidRequest, match=words):
            build(tmp_path / "store", paths, byte_level(), VOCAB, lambda done, size: None)


def rest(tmp_path: Path, *texts: str, **settings) -> RestDrafter:
    stored(tmp_path / "store", *texts)
    return RestDrafter(str(tmp_path / "store"), **{"nodes": 9, "least": 0.0, "shortest": 1, **settings})


def test_trees_hold_what_follows_in_the_files_by_how_often(tmp_path: Path) -> None:
    drafter = rest(tmp_path, "the catch", "the catch", "the patch", "other catch")
    text = [300, *encoded("the")]
    made = drafter.scored(host_view([text]), 9)
    assert made.chances is not None
    tokens, parents = made.trees[0]
    first = {tokens[n]: made.chances[0][n] for n, parent in enumerate(parents) if parent == 0}
    catch, patched = encoded("the catch")[1], encoded("the patch")[1]
    assert first[catch] == pytest.approx(2 * first[patched])
    assert made.chances[0] == sorted(made.chances[0], reverse=True)
    assert tuple(encoded("the patch")[1:]) in paths_of(proposed(drafter, [text], 9))
    assert proposal(drafter, [300, 301]) == set()
    assert leaves(proposal(rest(tmp_path, "the catch", "the catch", "the patch", nodes=1), text)) == {(catch,)}


def test_the_longest_end_counts_and_only_so_many_tokens(tmp_path: Path) -> None:
    line = encoded("the other cat then the patch")
    drafter = rest(tmp_path, "the other cat then the patch", "cat then there", nodes=30)
    for longest in (1, 4, 16):
        for end in range(2, len(line) - 1):
            drafter._longest = longest
            match = drafter._longest_match([300, *line[:end]])
            assert match.length == min(longest, end)
    assert (line[-1],) in proposal(drafter, [300, *line[:-1]])
    assert max(map(len, proposal(drafter, [300, *line[:1]]))) <= DEPTH


def test_limits_and_captured_trees(tmp_path: Path) -> None:
    drafter = rest(tmp_path, "the catch then", "the cat there", "other patch")
    batch = [encoded(text) for text in ("the", "the cat", "no")]
    for limits in ({"nodes": 2}, {"depth": 2}, {"nodes": 0}, {"depth": 0}, {}):
        seen, blind = proposed(drafter, batch, 9, **limits), proposed(drafter, batch, 9, size=5, blind=True, **limits)
        agree_with_parents(blind)
        for b in range(3):
            assert paths_of(seen, b) == paths_of(blind, b)
            assert len(paths_of(seen, b)) <= limits.get("nodes", 9)
            assert all(len(path) <= limits.get("depth", 9) for path in paths_of(seen, b))


def test_chances_are_how_often_the_files_were_right_and_nothing_stays(tmp_path: Path) -> None:
    drafter = rest(tmp_path, "the catch")
    text, catch = encoded("the"), encoded("the catch")[1]
    for right in (False, True):
        for _ in range(60):
            drafter.scored(host_view([text]), 9)
            drafter.scored(host_view([[*text, catch if right else 300]]), 0)
            drafter.release(0)
        made = drafter.scored(host_view([text]), 9)
        assert made.chances is not None
        assert (made.chances[0][1] > 0.4) == right
        drafter.release(0)
    assert drafter._asked == {}


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    drafter = rest(tmp_path, "the catch")

    class Other(TinyCheckpoint):
        def tokenizer(self) -> Tokenizer:
            return with_byte_fallback()

    for made in (drafter, CombinedDrafter([drafter, build_lookup("suffix", torch.device("cpu"))])):
        with pytest.raises(IncompatibleParts, match="another vocabulary"):
            check_datastores(made, Other(tiny_config()))
    with pytest.raises(IncompatibleParts, match="another vocabulary"):
        stored(tmp_path / "store", "then", tokenizer=with_byte_fallback())


def test_damaged_datastores_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with pytest.raises(InvalidRequest, match="no datastore"):
        Datastore(folder)
    stored(folder, "the catch")
    good, (segment,) = (folder / MANIFEST).read_text(), Manifest.read(folder).segments
    whole = (folder / segment).read_bytes()
    for damaged in (
        good.replace(KIND, "another"),
        good.replace(f'"{segment}"', '"../../etc/passwd"'),
        good.replace('"segments": {', '"segments": 3, "x": {'),
        good.replace('"fingerprint": "', '"fingerprint": 3, "x": "'),
        "[]",
        "{",
    ):
        (folder / MANIFEST).write_text(damaged)
        with pytest.raises(DraftwoodError, match=r"datastore|cannot be read|JSON"):
            Datastore(folder)
    (folder / MANIFEST).write_text(good)
    for content in (
        b"",
        whole[:-4],
        whole[:40],
        whole.replace(b"I32", b"F32"),
        whole.replace(KIND.encode(), b"x" * len(KIND)),
    ):
        (folder / segment).write_bytes(content)
        with pytest.raises(CheckpointError, match="Build it again"):
            Datastore(folder)


@pytest.mark.parametrize(
    "spec",
    ["rest", "rest:nowhere", "rest:path=nowhere", "rest:path={},nodes=0", "rest:{},longest=17", "rest:{},least=1.0"],
)
def test_impossible_settings_are_refused(tmp_path: Path, spec: str) -> None:
    stored(tmp_path / "store", "the catch")
    with pytest.raises(InvalidRequest):
        build_lookup(spec.format(tmp_path / "store"), torch.device("cpu"))


def test_from_the_command_line(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    (tmp_path / "text.txt").write_text("hello hello hello")
    command = [
        "datastore",
        "build",
        str(tmp_path / "text.txt"),
        "--model",
        str(folder),
        "--out",
        str(tmp_path / "store"),
    ]
    for added in (1, 0):
        done = CliRunner().invoke(app, [*command, "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["added"] == added
    assert CliRunner().invoke(app, command).exit_code == 0
    asked = ["generate", "hello", "--model", str(folder), "-n", "8", "--json", "--drafter"]
    said = [
        json.loads(CliRunner().invoke(app, [*asked, drafter]).stdout)["text"]
        for drafter in ("none", f"rest:path={tmp_path / 'store'}", f"combined:suffix+rest:{tmp_path / 'store'}")
    ]
    assert said[0] == said[1] == said[2]
