"""Our own kernels: the same function as the reference, and every row the same bits in whatever company."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftwood.errors import InvalidRequest
from draftwood.machine import give_back_memory
from draftwood.model.checkpoint import open_checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.names import tensor_shapes
from draftwood.model.native import NativeTransformer
from draftwood.model.runner import ModelRunner, load_model, require_strict
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS, WeightFormat
from draftwood.ops.native import kernels, library
from draftwood.protocols import Span
from draftwood.tree import TokenTree
from staging import text_batch, tree_logits
from tiny import CPU, TinyCheckpoint, hf_config, tiny_config

FAMILIES = {
    "llama": tiny_config("llama"),
    "llama-tied": tiny_config("llama", tie_word_embeddings=True, vocab_size=45),
    "mistral-window": tiny_config("mistral"),
    "qwen2-bias": tiny_config("qwen2"),
    "qwen3-norm": tiny_config("qwen3"),
    "gelu": tiny_config("llama", hidden_act="gelu"),
    "gelu-tanh": tiny_config("llama", hidden_act="gelu_pytorch_tanh"),
    "odd-sizes": tiny_config("llama", hidden_size=40, intermediate_size=50, head_dim=20),
    "big-heads": tiny_config("llama", head_dim=80, num_attention_heads=6, num_key_value_heads=2),
}
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
PORTABLE = (*library.FLAGS, "-mno-avx512f", "-mno-avxvnni")  # what other processors compile


@pytest.fixture(scope="session", params=["native", "portable"])
def compiled(request: pytest.FixtureRequest) -> library.Kernels:
    """The kernels for this processor, and those for one without AVX-512."""
    if kernels() is None:
        pytest.skip(f"no kernels here: {library.why_missing()}")
    flags = library.FLAGS if request.param == "native" else PORTABLE
    return library.load(library.build(flags))


def texts(vocabulary: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in (37, 5, 21)]


def short_texts(vocabulary: int) -> list[list[int]]:
    return [[i % vocabulary, (3 * i + 1) % vocabulary] for i in range(20)]


def in_chunks(runner: ModelRunner, tokens: list[int], sizes: Iterator[int]) -> torch.Tensor:
    """All logits of one text."""
    tables, rows, start = runner.cache.tables, [], 0
    tables.open(0, ())
    tables.reserve(0, len(tokens))
    while start < len(tokens):
        end = min(len(tokens), start + next(sizes))
        rows.append(runner.forward(text_batch(runner, [Span(0, tokens, start, end)])).logits)
        start = end
    tables.close(0)
    return torch.cat(rows)


def same(size: int) -> Iterator[int]:
    while True:
        yield size


def runner_of(model) -> ModelRunner:
    return ModelRunner(model, 64, 4)


@pytest.mark.parametrize("weights", FORMATS.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_references(compiled: library.Kernels, family: str, weights: WeightFormat) -> None:
    checkpoint = TinyCheckpoint(FAMILIES[family])
    native = runner_of(NativeTransformer(compiled, checkpoint, weights))
    reference = runner_of(Transformer(checkpoint, torch.float64, CPU, weights))
    asked = short_texts(checkpoint.config.vocab_size) if weights.byte_activations else texts(13)
    worst = [
        float((in_chunks(native, tokens, same(64)) - in_chunks(reference, tokens, same(64))).abs().max())
        for tokens in asked
    ]
    # Rounding inputs to bytes is a step function: now and then float32 and float64 fall on two sides of a step, and
    # then everything after it differs by steps. Most short texts meet no such case.
    allowed = len(asked) // 5 if weights.byte_activations else 0
    assert sum(difference > 5e-5 for difference in worst) <= allowed


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights", FORMATS.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "big-heads", "odd-sizes"])
def test_a_row_is_the_same_bits_in_any_company(
    compiled: library.Kernels, family: str, weights: WeightFormat, threads: int
) -> None:
    """One row at a time, in chunks, in a batch with others, as a chain of draft nodes and as a branch of a tree."""
    checkpoint = TinyCheckpoint(FAMILIES[family])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runner = runner_of(NativeTransformer(compiled, checkpoint, weights))
        asked = texts(checkpoint.config.vocab_size)
        alone = [in_chunks(runner, tokens, same(1)) for tokens in asked]
        for size in (2, 3, 7, 13, 64):
            assert torch.equal(in_chunks(runner, asked[0], same(size)), alone[0])
        together = batched(runner, asked)
        assert all(torch.equal(got, want) for got, want in zip(together, alone, strict=True))
        for drafted in (1, 4, 11):
            assert torch.equal(as_branch(runner, asked[0], drafted), alone[0][-drafted - 1 :])
    finally:
        torch.set_num_threads(before)


def batched(runner: ModelRunner, asked: list[list[int]]) -> list[torch.Tensor]:
    tables = runner.cache.tables
    for i, tokens in enumerate(asked):
        tables.open(i, ())
        tables.reserve(i, len(tokens))
    spans = [Span(i, tokens, 0, len(tokens)) for i, tokens in enumerate(asked)]
    logits = runner.forward(text_batch(runner, spans)).logits
    for i in range(len(asked)):
        tables.close(i)
    return list(logits.split([len(tokens) for tokens in asked]))


def as_branch(runner: ModelRunner, tokens: list[int], drafted: int) -> torch.Tensor:
    """The last `drafted` tokens as one branch of a tree with false siblings at every depth; root first."""
    tables, committed, path = runner.cache.tables, tokens[:-drafted], tokens[-drafted:]
    tables.open(0, ())
    tables.reserve(0, len(tokens) + 2 * drafted)
    wrong = [(token + 1) % runner.model.config.vocab_size for token in path]
    nodes, parents, right = [committed[-1]], [-1], [0]
    for token, other in zip(path, wrong, strict=True):
        nodes += [other, token]
        parents += [right[-1], right[-1]]
        right.append(len(nodes) - 1)
    tree = TokenTree.of_points([(nodes, parents)], CPU)
    logits = tree_logits(runner, [Span(0, committed, 0, len(committed))], tree)
    tables.close(0)
    return logits[right]


def test_features_are_the_residual_stream(compiled: library.Kernels) -> None:
    checkpoint = TinyCheckpoint(tiny_config(layers=3))
    tokens = texts(13)[0]
    found = []
    for model in (
        NativeTransformer(compiled, checkpoint, FORMATS["stored"]),
        Transformer(checkpoint, torch.float64, CPU),
    ):
        runner = runner_of(model)
        runner.cache.tables.open(0, ())
        runner.cache.tables.reserve(0, len(tokens))
        batch = runner.cache.stage_text([Span(0, tokens, 0, len(tokens))], torch.tensor([3, 9]))
        found.append(runner.forward(batch, frozenset({2, 0})).features)
    assert sorted(found[0]) == [0, 2]
    for layer in (0, 2):
        torch.testing.assert_close(found[0][layer].double(), found[1][layer], rtol=1e-5, atol=5e-5)


def test_a_quantised_model_is_small(compiled: library.Kernels) -> None:
    checkpoint = TinyCheckpoint(tiny_config(vocab_size=512, hidden_size=64, intermediate_size=128))
    sizes = {name: NativeTransformer(compiled, checkpoint, FORMATS[name]).num_bytes for name in FORMATS}
    assert sizes["stored"] == sizes["float32"]
    assert sizes["float32"] > 1.9 * sizes["bfloat16"] > 3.4 * sizes["int8"] > 3.6 * sizes["int4"]
    assert sizes["w8a8"] == sizes["int8"]


def test_progress_is_told_matrix_by_matrix(compiled: library.Kernels) -> None:
    heard: list[tuple[int, int]] = []
    NativeTransformer(
        compiled, TinyCheckpoint(tiny_config()), FORMATS["int8"], lambda done, total: heard.append((done, total))
    )
    assert [done for done, _ in heard] == list(range(1, len(heard) + 1))
    assert heard[-1][0] == heard[-1][1]


def peak() -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))


@pytest.mark.skipif(not CLEAR.exists(), reason="the system does not say how much memory there was at most")
def test_loading_takes_little_more_than_the_model(compiled: library.Kernels, tmp_path: Path) -> None:
    """Rounding needs memory for some rows alone, also where matrices are joined or wide."""
    config = hf_config("llama", 64, 1, hidden_size=256, intermediate_size=24576)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(ModelConfig.from_hf(config))
    save_file(
        {n: torch.full(shape, 0.25, dtype=torch.bfloat16) for n, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    give_back_memory()
    NativeTransformer(compiled, TinyCheckpoint(tiny_config()), FORMATS["int8"])  # libraries are in memory now
    CLEAR.write_text("5")  # the most so far is what there is now
    before = peak()
    model = NativeTransformer(compiled, open_checkpoint(tmp_path), FORMATS["int8"])
    assert model.num_bytes > 20e6
    assert (peak() - before) * 1024 < model.num_bytes + 40e6  # joined at once, 100 MB more


def test_without_a_compiler_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    library._attempt.cache_clear()
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    try:
        assert kernels() is None
        assert "no C compiler" in str(library.why_missing())
        model = load_model(TinyCheckpoint(tiny_config()), torch.float32, CPU, FORMATS["w4a8"])
        assert isinstance(model, Transformer)
        with pytest.raises(InvalidRequest, match="no C compiler"):
            require_strict(model)
    finally:
        library._attempt.cache_clear()


def test_the_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    library._attempt.cache_clear()
    monkeypatch.setenv(library.SWITCH, "0")
    try:
        assert kernels() is None
        assert library.SWITCH in str(library.why_missing())
    finally:
        library._attempt.cache_clear()


def test_a_library_that_is_none_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library._attempt.cache_clear()
    monkeypatch.setenv(library.SWITCH, str(tmp_path / "nothing.so"))
    try:
        assert kernels() is None
        assert "nothing.so" in str(library.why_missing())
    finally:
        library._attempt.cache_clear()


def test_a_compiler_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'x.c:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    with pytest.raises(library.BuildError, match="no such thing"):
        library.build(library.FLAGS)
    assert list((tmp_path / "home" / "native").iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.delenv(library.SWITCH, raising=False)
    library._attempt.cache_clear()
    try:
        if kernels() is not None or "no C compiler" in str(library.why_missing()):
            pytest.skip("no compiler")
        reason = str(library.why_missing())
    finally:
        library._attempt.cache_clear()
    assert "not a directory" in reason
    assert "set DRAFTWOOD_HOME to a folder" in reason
    assert "Errno" not in reason


def test_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if kernels() is None:
        pytest.skip("no compiler")
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))
    quick = ("-O0", "-std=gnu11", "-fopenmp", "-fPIC", "-march=native")
    first = library.build(quick)
    monkeypatch.setattr(subprocess, "run", _only_versions(subprocess.run))
    assert library.build(quick) == first


QUICK = ("-O0",)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a library in it, of a compiler that only writes what it was told."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nfor last; do [ "$before" = -o ] && echo "$0" > "$last"; before=$last; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    return library.build(QUICK)


def test_the_folder_of_a_library_is_private_whatever_the_umask(kept: Path) -> None:
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    before = os.umask(0o002)
    try:
        kept.unlink()
        assert not stat.S_IMODE(library.build(QUICK).stat().st_mode) & 0o022
    finally:
        os.umask(before)


def test_a_damaged_library_is_compiled_again(kept: Path) -> None:
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    again = library.build(QUICK)
    assert again == kept
    assert again.read_bytes() == whole


def test_a_library_that_others_could_have_written_is_not_loaded(kept: Path) -> None:
    planted = kept.parent / "planted.so"
    for folder_mode, file_mode in ((0o777, 0o700), (0o770, 0o700), (0o700, 0o722)):
        os.utime(kept, (1, 1))
        planted.touch()
        kept.chmod(file_mode)
        kept.parent.chmod(folder_mode)
        kept = library.build(QUICK)
        assert kept.stat().st_mtime > 1  # a new one
        assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
        assert planted.exists() == (folder_mode == 0o700)


def test_links_are_not_followed(kept: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / kept.name
    kept.rename(elsewhere)
    kept.symlink_to(elsewhere)
    again = library.build(QUICK)
    assert again == kept
    assert not again.is_symlink()
    kept.parent.rename(tmp_path / "real")
    kept.parent.symlink_to(tmp_path / "real")
    assert library.build(QUICK).parent == tmp_path / "home" / f"native-{os.geteuid()}"


def test_folders_of_other_users_are_refused_with_advice(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    (kept.parent.parent / "native-12345").mkdir()
    with pytest.raises(library.BuildError, match=r"native-12345 belong to other users.*DRAFTWOOD_HOME"):
        library.build(QUICK)


def test_a_home_that_everyone_writes_to_is_refused_with_advice(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "home").chmod(0o777)
    with pytest.raises(library.BuildError, match=r"home can be written to by every user.*DRAFTWOOD_HOME"):
        library.build(QUICK)
    (tmp_path / "home").chmod(0o1777)  # as /tmp, where nobody can rename what is ours
    assert library.build(QUICK) == kept


def test_a_home_that_cannot_be_made_is_told_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(library.BuildError, match="DRAFTWOOD_HOME"):
        library.build(QUICK)


def _only_versions(run):
    def checked(command, **options):
        assert "--version" in command, "compiled again"
        return run(command, **options)

    return checked


def test_strict_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(InvalidRequest, match=r"float32, not torch\.float64"):
        require_strict(load_model(TinyCheckpoint(tiny_config()), torch.float64, CPU))
    if kernels() is not None:
        require_strict(load_model(TinyCheckpoint(tiny_config()), torch.float32, CPU))
