"""The laboratory on tiny models: what it records is what the engine would have verified, and nothing of it is noise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from draftwood.cli.app import app
from draftwood.engine.llm import LLM
from draftwood.errors import InvalidRequest
from draftwood.growers import Paths
from draftwood.lab.claims import check_claims
from draftwood.lab.experiment import Setting, read_prompts, record, replay
from draftwood.lab.replay import Results, Sample, expected_tokens, first_paths, growers, laws_for, samples
from draftwood.lab.rows import Rows, load_rows
from draftwood.protocols import BatchView
from draftwood.rng import KeyedRng
from draftwood.tree import TokenTree
from draftwood.verifiers import LAWS
from enumeration import view_of
from tiny import tiny_folder

SETTING = Setting(temperatures=(1.0,), paths=3, depth=3, contexts=2, tokens=6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tiny_folder(folder / "big"), tiny_folder(folder / "small", family="qwen3", layers=1)


@pytest.fixture(scope="module")
def rows(models: tuple[Path, Path]) -> list[Rows]:
    with LLM(models[0], drafter=f"model:{models[1]}") as llm:
        found = list(record(llm, ["one text", "another"], SETTING))
        llm.engine.target.cache.tables.check()
        assert llm.engine.target.cache.tables.pool.num_available == llm.engine.target.cache.tables.pool.num_pages
    return found


def test_every_tree_is_recorded_in_every_context(rows: list[Rows]) -> None:
    assert {(r.context, r.family) for r in rows} == {(c, f) for c in (0, 1) for f in growers(3, 3)}
    for r in rows:
        r.tree.validate()
        assert r.p.shape[0] == r.tree.num_nodes
        assert torch.allclose(r.p.sum(-1), torch.ones(len(r.p)), atol=1e-5)


def test_the_root_is_the_same_in_all_trees_of_a_context(rows: list[Rows]) -> None:
    """The target's row there does not depend on what was drafted, or recorded before."""
    for context in (0, 1):
        roots = torch.stack([r.p[0] for r in rows if r.context == context])
        assert torch.allclose(roots, roots[:1].expand_as(roots), atol=1e-6)


def test_rows_come_back_from_a_folder(rows: list[Rows], tmp_path: Path) -> None:
    for r in rows:
        r.save(tmp_path)
    again = {(r.context, r.family): r for r in load_rows(tmp_path)}
    assert len(again) == len(rows)
    for r in rows:
        other = again[(r.context, r.family)]
        assert torch.equal(other.p, r.p)
        assert torch.equal(other.tree.tries, r.tree.tries)
    (tmp_path / "00000-1-zzz.safetensors").write_bytes(next(tmp_path.glob("*.safetensors")).read_bytes()[:100])
    with pytest.raises(InvalidRequest, match="does not hold recorded rows"):
        list(load_rows(tmp_path))
    with pytest.raises(InvalidRequest, match="no recorded rows"):
        list(load_rows(tmp_path / "nowhere"))


def test_fewer_paths_are_part_of_more(rows: list[Rows]) -> None:
    """The first path of three is a chain, and its nodes' rows are those recorded for it."""
    for r in rows:
        if r.family != "paths":
            continue
        chain, nodes = first_paths(r.tree, 1)
        chain.validate()
        assert chain.max_depth == 3
        assert chain.num_drafted == 3
        assert torch.equal(r.tree.tokens[nodes], chain.tokens)
        assert [s.paths for s in samples(r, 3, 3)] == [1, 2, 3]


@pytest.mark.parametrize("law", ["rrs", "kseq", "traversal", "layer", "gbv", "match"])
def test_expectations_are_what_many_verdicts_average_to(law: str, rows: list[Rows]) -> None:
    """No sampling noise in the laboratory, so it must agree with the sampling of the shipped verdict, to its noise."""
    recorded = next(r for r in rows if r.family == "paths")
    sample = Sample("paths", 3, Paths(3, 3).law, recorded.tree, recorded.p)
    count = 3000
    tree, p = recorded.tree, recorded.p
    verdicts = [LAWS[law]().verify(*_copies(tree, p, 500), _many(500, seed=i), KeyedRng()) for i in range(count // 500)]
    lengths = torch.cat([v.length for v in verdicts]).double()
    noise = float(lengths.std()) / count**0.5
    assert float(lengths.mean()) + 1 == pytest.approx(expected_tokens(law, sample), abs=5 * noise + 1e-9)


def _many(count: int, seed: int) -> BatchView:
    return replace(view_of(sequences=count), seeds=torch.arange(count) + 1000 * seed)


def _copies(tree: TokenTree, p: torch.Tensor, count: int) -> tuple[TokenTree, torch.Tensor]:
    """The same tree many times in one batch."""
    shape = tree.shape.tiled(count, tree.tokens.device)
    batch = TokenTree(tree.tokens.repeat(count), shape, tree.draw.repeat(count), tree.q_row.repeat(count), tree.q)
    return batch, p.repeat(count, 1)


def test_the_report_has_every_law_and_every_claim(rows: list[Rows], tmp_path: Path) -> None:
    results = replay(iter(rows), SETTING, save=tmp_path / "kept")
    cells = {(c["tree"], c["paths"], c["law"]): c for c in results.cells()}
    assert ("paths", 1, "block") in cells
    assert ("paths", 3, "gbv") in cells
    assert ("hybrid", 2, "layer") in cells
    assert ("without-replacement", 3, "traversal") in cells
    assert all(1 <= c["tokens"] <= 4 + 1e-6 for c in cells.values())
    assert cells[("paths", 1, "block")]["tokens"] >= cells[("paths", 1, "token")]["tokens"] - 1e-6
    assert len(check_claims(results)) == 7
    assert len(list((tmp_path / "kept").iterdir())) == len(rows)


@pytest.mark.parametrize(
    ("gains", "holds"),
    [([0.2, 0.3, 0.25], True), ([-0.2, -0.3, -0.25], False), ([0.5, -0.4, 0.1], None), ([1.0], None)],
)
def test_a_claim_holds_only_if_chance_is_no_explanation(gains: list[float], holds: bool | None) -> None:
    results = Results()
    results.tokens[(1.0, "paths", 1, "token")] = dict.fromkeys(range(len(gains)), 2.0)
    results.tokens[(1.0, "paths", 1, "block")] = {i: 2.0 + gain for i, gain in enumerate(gains)}
    assert check_claims(results)[0]["holds"] is holds
    assert check_claims(results)[1]["here"] == "not measured"


def test_laws_are_listed_once_for_a_chain(rows: list[Rows]) -> None:
    chain = next(s for r in rows if r.family == "paths" for s in samples(r, 3, 3) if s.paths == 1)
    assert [n for n in laws_for(chain) if LAWS[n]().lossless] == ["match", "token", "block"]


def test_prompts_are_read_in_any_of_three_ways(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('plain\n{"turns": ["first", "second"]}\n\n{"prompt": "p"}\n{"text": "t"}\n')
    assert read_prompts(file) == ["plain", "first", "p", "t"]
    for bad in ("", '{"turns": []}', "{broken"):
        file.write_text(bad)
        with pytest.raises(InvalidRequest):
            read_prompts(file)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_prompts(tmp_path / "missing")


@pytest.mark.parametrize("bad", [{"temperatures": (0.0,)}, {"paths": 9}, {"depth": 1}, {"contexts": 0}])
def test_impossible_settings_are_refused(bad: dict) -> None:
    with pytest.raises(InvalidRequest):
        Setting(**bad)


def figures(report: dict) -> dict[str, float]:
    return {f"{c['tree']} {c['paths']} {c['law']}": c["tokens"] for c in report["cells"]}


def test_the_command(models: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    arguments = ["laws", "--model", str(models[0]), "--drafter", f"model:{models[1]}", "--prompts", str(prompts)]
    arguments += [
        "--temperatures",
        "1.0",
        "--contexts",
        "1",
        "--paths",
        "2",
        "--depth",
        "2",
        "--out",
        str(tmp_path / "o"),
    ]
    done = CliRunner().invoke(app, [*arguments, "--save", str(tmp_path / "rows")])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "o" / "laws.json").read_text())
    assert report["contexts"] == 1
    assert "<html" in (tmp_path / "o" / "laws.html").read_text()
    replayed = [
        "laws",
        "--rows",
        str(tmp_path / "rows"),
        "--paths",
        "2",
        "--depth",
        "2",
        "--out",
        str(tmp_path / "again"),
    ]
    done = CliRunner().invoke(app, replayed)
    assert done.exit_code == 0, done.output
    again = json.loads((tmp_path / "again" / "laws.json").read_text())
    assert figures(again) == pytest.approx(figures(report))


def test_the_list_says_what_is_lossless() -> None:
    done = CliRunner().invoke(app, ["laws", "--list"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for name in LAWS:
        assert name in done.output


def test_without_a_pair_it_says_what_it_needs() -> None:
    done = CliRunner().invoke(app, ["laws"])
    assert done.exit_code == 1
