"""The shape of the code base: layers import downwards, the engine knows no drafter and no law, names are pinned."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import draftwood

SOURCE = Path(draftwood.__file__).parent

LAYERS = [  # each may import what stands above it
    ("errors",),
    (
        "links",
        "entries",
        "request",
        "wire",
        "shape",
        "tree",
        "joining",
        "states",
        "batch",
        "telemetry",
        "costs",
        "machine",
    ),
    ("protocols",),
    ("rng", "sampling", "cache", "ops", "model", "config", "ranks"),
    ("drafting",),
    ("faults", "nets"),
    ("growers", "drafters", "verifiers"),
    ("engine", "assembly", "settling", "calibration", "warmup"),
    ("lab", "train", "server"),
    ("ray",),
    ("cli", "__main__", "__init__", "extend"),
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The draftwood modules a file imports, dotted, without the package's own name."""
    found: set[str] = set()
    package = ("draftwood", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            found |= {module} if node.module else {f"{module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("draftwood.") for name in found if name.startswith("draftwood.")}


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    for name in imports(path):
        assert RANK[name.split(".")[0]] <= RANK[part_of(path)], f"{path.name} imports {name}"


def test_the_step_knows_no_drafter_and_no_law_by_name() -> None:
    step = ("engine", "decode_step", "graph_runner", "launched", "shapes", "scheduler", "plan")
    for name in (*step, "sequence", "text", "controller", "worker"):
        assert not {i for i in imports(SOURCE / "engine" / f"{name}.py") if i.startswith(("drafters", "verifiers"))}


@pytest.mark.parametrize("path", ["engine/scheduler.py", "cache/blocks.py", "engine/text.py", "request.py"])
def test_the_host_side_needs_no_tensors(path: str) -> None:
    assert "import torch" not in (SOURCE / path).read_text()


def test_no_pickle_anywhere() -> None:
    for path in FILES:
        text = path.read_text()
        assert "import pickle" not in text
        assert "torch.load" not in text or path.name == "pickles.py"  # behind a flag, tensors only


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 420, f"{path.name} has grown too long"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{path.name}: {node.name} has {length} lines"


def test_public_names() -> None:
    assert sorted(draftwood.__all__) == [
        "Completion",
        "DraftwoodError",
        "EngineConfig",
        "Event",
        "FinishReason",
        "LLM",
        "Result",
        "SamplingParams",
        "Slo",
        "SpeculationStats",
        "__version__",
    ]
    for name in draftwood.__all__:
        assert getattr(draftwood, name) is not None


def test_type_checkers_are_told_that_the_package_has_types() -> None:
    """PEP 561; the wheel takes all files of the package's folder."""
    assert (SOURCE / "py.typed").is_file()
