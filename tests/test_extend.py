"""`draftwood.extend`: the names are there, they suffice for the examples, and the law of the example is lossless."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import draftwood
from draftwood import extend
from draftwood.drafting import Grower
from draftwood.growers import Beam, BestFirst, Independent, Levels, chain
from enumeration import assert_lossless, constant, drafts_of, law_error, node_law, random_rows, round_law

EXAMPLES = Path(__file__).parent.parent / "examples"
GROWERS: dict[str, Grower] = {
    "chain": chain(2),
    "beam": Beam(nodes=5, width=2, depth=2),
    "best-first": BestFirst(nodes=4, width=2, forwards=3),
}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_name_resolves_and_is_documented() -> None:
    assert sorted(set(extend.__all__)) == sorted(extend.__all__)
    for name in extend.__all__:
        assert getattr(extend, name).__doc__, name


def test_the_names_are_those_that_were_promised() -> None:
    """Removing one needs a new major version (a minor one before 1.0) and a line in the changelog."""
    promised = {
        *("BatchView", "Drafter", "Features", "HostView", "Proposal", "Randomness", "Silent", "Verifier"),
        *("DraftLaw", "Draw", "POINT_CHAIN", "POINT_TREE", "NodeMap", "TokenTree", "TreeShape", "Verdict"),
        *("NodeLaw", "Odds", "Scope", "HostDrafter", "PointDrafter", "PointTree"),
        *("ForwardBatch", "FrontierModel", "Grower"),
    }
    assert promised <= set(extend.__all__)


@pytest.mark.parametrize("name", ["own_drafter", "own_law"])
def test_the_examples_need_nothing_but_the_public_surface(name: str) -> None:
    imported: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse((EXAMPLES / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("draftwood") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftwood"):
            imported |= {(node.module or "", alias.name) for alias in node.names}
    public = {"draftwood": draftwood.__all__, "draftwood.extend": extend.__all__}
    assert imported
    assert {name for name in imported if name[1] not in public.get(name[0], ())} == set()


@pytest.mark.parametrize("grower", GROWERS.values(), ids=GROWERS)
def test_the_law_of_the_example_is_lossless(grower: Grower) -> None:
    law = example("own_law").TargetSampling()
    for seed in range(5):
        p, q = random_rows(seed, 3), random_rows(100 + seed, 3)
        assert_lossless(node_law(law, drafts_of(grower, q), p), p, 3)
        assert_lossless(round_law(grower, law, p, q), p, 3)


def test_the_law_of_the_example_refuses_trees_it_is_not_exact_for() -> None:
    law, drawn = example("own_law").TargetSampling(), Levels((2,), Independent())
    assert "independent draws" in law.refuses(drawn.law)
    p, q = constant(0.5, 0.5), constant(0.9, 0.1)
    assert law_error(node_law(law, drafts_of(drawn, q), p), p, 2) > 1e-2, "independent draws repeat tokens"
