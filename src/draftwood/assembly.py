"""From names to parts: `ngram:nodes=8`, `beam:nodes=16,width=4`, `model:PATH`. The only place that knows them all.

A name may carry settings behind a colon, separated by commas; `draftwood parts` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftwood.config import EngineConfig
from draftwood.drafters.by_request import OfferedDrafters
from draftwood.drafters.combined import CombinedDrafter
from draftwood.drafters.lookup import LookupDrafter
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.pard import GUESSES, ParallelDrafter
from draftwood.drafters.points import HostDrafter
from draftwood.drafters.predicted import PredictedDrafter
from draftwood.drafters.recycling import RecyclingDrafter
from draftwood.drafters.student import StudentDrafter
from draftwood.drafters.substitute import SubstituteDrafter
from draftwood.drafters.suffix import SuffixDrafter
from draftwood.drafters.trained import drafter_of
from draftwood.drafting import Drafter, Grower
from draftwood.entries import Entry, split_spec
from draftwood.errors import IncompatibleParts, InvalidRequest
from draftwood.growers import (
    Beam,
    Best,
    BestFirst,
    ChildPicker,
    Coupled,
    Hybrid,
    Independent,
    Levels,
    Paths,
    WithoutReplacement,
)
from draftwood.machine import give_back_memory
from draftwood.model.checkpoint import HUB_ID, Checkpoint, open_checkpoint
from draftwood.model.native import Progress
from draftwood.model.runner import ModelRunner, require_strict
from draftwood.model.weights import FORMATS
from draftwood.nets.dflash import BlockNet
from draftwood.nets.eagle import Eagle3
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.layouts import (
    DrafterFiles,
    Layout,
    build_net,
    misfit_explained,
    open_drafter,
    recognise,
    self_test,
)
from draftwood.nets.layouts.student import student_words
from draftwood.nets.medusa import HeadStack
from draftwood.nets.pard import ParallelEagle
from draftwood.nets.shared import SharedWords
from draftwood.nets.student import MaskedStudent
from draftwood.protocols import Verifier
from draftwood.tree import DraftLaw
from draftwood.verifiers import AUTO, LAWS, ByRequest, default_law

DEFAULT_TREE = "chain"
CPU = torch.device("cpu")
TRAINED = Path(__file__).parent / "trained"  # drafters that come with the package, for the embedded model
SHIPPED = tuple(sorted(folder.name for folder in TRAINED.glob("*") if (folder / "config.json").is_file()))
SHIPPED_SAYS: Mapping[str, str] = {
    "eagle3": "EAGLE-3: one layer that reads three of the target's layers and guesses token by token",
    "block": "DSpark: a whole block of tokens in one pass, each corrected by the one before it",
    "medusa": "Medusa: several heads, each guesses one of the next tokens without seeing the others' guesses",
    "hydra": "Hydra: several heads, each sees the tokens guessed before its own",
    "student": "a small language model between the target's own embedding and head",
}


def _levels(picker: ChildPicker) -> Callable[..., Grower]:
    return lambda widths: Levels(widths, picker)


TREES: Mapping[str, Entry] = {
    "chain": Entry(lambda depth: Levels((1,) * depth, Best()), {"depth": 4}, "the likeliest token, again and again"),
    "static": Entry(_levels(Best()), {"widths": (2, 2, 1)}, "the likeliest children of every node, level by level"),
    "beam": Entry(Beam, {"nodes": 16, "width": 4, "depth": 4}, "EAGLE-2: expand the likeliest of each level, rerank"),
    "best-first": Entry(
        BestFirst,
        {"nodes": 16, "width": 4, "forwards": 4},
        "grow wherever the draft is likeliest, at any depth",
    ),
    "sampled-chain": Entry(
        lambda depth: Levels((1,) * depth, Independent()), {"depth": 4}, "a drawn token, again and again"
    ),
    "sampled": Entry(_levels(Independent()), {"widths": (2, 2, 1)}, "independently drawn children"),
    "without-replacement": Entry(
        _levels(WithoutReplacement()), {"widths": (2, 2, 1)}, "children drawn without repeating a sibling"
    ),
    "paths": Entry(
        Paths, {"paths": 2, "depth": 4, "trunk": 0}, "independent paths, merged where they agree, behind a common trunk"
    ),
    "coupled": Entry(_levels(Coupled()), {"widths": (1, 1, 1, 1)}, "what the target's own noise makes of the draft"),
    "hybrid": Entry(_levels(Hybrid()), {"widths": (2, 2, 1)}, "the likeliest children and one drawn from the rest"),
}


def _ngram_on_gpu(nodes: int, longest: int, shortest: int, branches: int) -> Drafter:
    """One branch is looked up there; several are the host's."""
    if branches > 1:
        return NgramDrafter(nodes, longest, shortest, branches)
    return LookupDrafter(nodes, longest, shortest)


# Drafters that can be combined, for so many nodes; where they agree, less likely ones may be likely enough.
SOURCES: Mapping[str, Callable[[int, float], HostDrafter]] = {
    "suffix": lambda nodes, least: SuffixDrafter(nodes, least=least / 2),
    "ngram": lambda nodes, least: NgramDrafter(nodes, branches=2),
}


def _combined(sources: str, nodes: int, least: float) -> CombinedDrafter:
    names = sources.split("+")
    unknown = [name for name in names if name not in SOURCES]
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"'{sources}' should be different ones of {', '.join(SOURCES)}, joined by +")
    return CombinedDrafter([SOURCES[name](nodes, least) for name in names], nodes, least)


LOOKUPS: Mapping[str, Entry] = {
    "none": Entry(NoDrafter, {}, "plain decoding"),
    "ngram": Entry(
        NgramDrafter,
        {"nodes": 4, "longest": 4, "shortest": 0, "branches": 1},
        "what followed the last tokens earlier in the text (shortest=0: 2, or 1 for one branch on a GPU)",
        on_gpu={"nodes": 15},  # with the root a whole tile of rows; budgets take fewer where they do not pay
        make_on_gpu=_ngram_on_gpu,
    ),
    "suffix": Entry(
        SuffixDrafter,
        {"nodes": 8, "longest": 32, "shortest": 1, "least": 0.2, "shared": 65536},
        "a tree of what followed the last tokens earlier in the text or in answers to others, by how likely it is",
        on_gpu={"nodes": 15, "least": 0.02},
    ),
    "recycling": Entry(
        RecyclingDrafter,
        {"nodes": 8, "width": 8, "depth": 6, "least": 0.2},
        "a tree of what the target held likeliest when it last ran each token, by how often that was right",
        on_gpu={"nodes": 31, "least": 0.02},
    ),
    "combined": Entry(
        _combined,
        {"sources": "suffix+ngram", "nodes": 8, "least": 0.2},
        "several drafters' trees as one, by how often each is right: combined:suffix+ngram,nodes=8",
        on_gpu={"nodes": 15, "least": 0.02},
        unnamed="sources",
    ),
}
MODEL_DRAFTER = "model:NAME"
SUBSTITUTE = "subspec"  # the target's own layers, low-bit copies of those that are away
SUBSTITUTED = ("int4", "int8")


def is_lookup(drafter: str) -> bool:
    """Whether the name is that of a drafter without weights, which makes its own trees."""
    return drafter.partition(":")[0] in LOOKUPS


def _entry(kind: str, table: Mapping[str, Entry], name: str, others: tuple[str, ...] = ()) -> Entry:
    if name not in table:
        raise InvalidRequest(f"Unknown {kind} '{name}': choose one of {', '.join((*table, *others))}.")
    return table[name]


def build_grower(spec: str) -> Grower:
    """A tree shape by name."""
    name, settings = split_spec(spec)
    return _entry("tree", TREES, name).build("tree", name, settings)


def build_verifier(spec: str, device: torch.device = CPU) -> Verifier:
    """An acceptance law by name."""
    name, settings = split_spec(spec)
    if name not in LAWS:
        raise InvalidRequest(f"Unknown law '{name}': choose one of {', '.join((AUTO, *LAWS))}.")
    entry = LAWS[name]
    if entry.on_cpu_only and device.type != "cpu":
        raise InvalidRequest(
            f"The law '{name}' asks the host at every node, so it runs on a CPU only; use another one."
        )
    return Entry(entry, entry.defaults, entry.says).build("law", name, settings)


def choose_law(spec: str | Verifier, drafts: DraftLaw, device: torch.device = CPU) -> ByRequest:
    """The law of an engine, `auto` being whatever suits its drafts; requests may name others."""

    def find(name: str) -> Verifier:
        return build_verifier(default_law(drafts) if name == AUTO else name, device)

    return ByRequest(find(spec) if isinstance(spec, str) else spec, find)


def suited_tree(drafter: str, law: str | Verifier) -> str | None:
    """The tree a law asks for where the user names none."""
    return "coupled" if law == "coupled" and not is_lookup(drafter) else None


def build_drafter(
    spec: str, tree: str | None, target: Checkpoint, config: EngineConfig, *, allow_pickle: bool = False
) -> Drafter:
    """A drafter by name; `model:NAME` loads a second model, and a folder whatever was trained and lies there."""
    if spec.startswith("model:"):
        return load_model_drafter(open_checkpoint(spec.removeprefix("model:"), config.impl), tree, target, config)
    name, _, _ = spec.partition(":")
    if name == SUBSTITUTE:
        return _substitute(spec, tree, target, config)
    trained = trained_folder(spec)
    if name not in LOOKUPS and (trained.is_dir() or HUB_ID.fullmatch(spec)):
        return load_trained(trained if trained.is_dir() else spec, tree, target, config, allow_pickle=allow_pickle)
    entry = _entry("drafter", LOOKUPS, name, (*SHIPPED, MODEL_DRAFTER, SUBSTITUTE, "a folder"))
    if tree is not None:
        raise InvalidRequest(
            f"The drafter '{name}' makes its own trees; --tree goes with models and trained networks. "
            f"Its settings are: {', '.join(entry.defaults) or 'none'}."
        )
    return build_lookup(spec, config.torch_device())


def _substitute(spec: str, tree: str | None, target: Checkpoint, config: EngineConfig) -> SubstituteDrafter:
    _, settings = split_spec(spec)
    weights = settings.pop("weights", SUBSTITUTED[0])
    if settings or weights not in SUBSTITUTED:
        raise InvalidRequest(
            f"'{spec}': the drafter '{SUBSTITUTE}' has the setting weights, {' or '.join(SUBSTITUTED)}."
        )
    if not config.offload:
        raise InvalidRequest(f"'{SUBSTITUTE}' drafts with the layers that --offload leaves on the device; give that.")
    grower = build_grower(tree or usual_tree(SubstituteDrafter, config.torch_device()))
    return SubstituteDrafter(target, FORMATS[weights], grower)


def build_lookup(spec: str, device: torch.device) -> Drafter:
    """A drafter without weights by name, with the settings that are usual on a device."""
    entry = LOOKUPS[spec.partition(":")[0]].on(device)
    name, settings = split_spec(spec, entry.unnamed)
    return entry.build("drafter", name, settings)


def offer(default: Drafter, by_name: Mapping[str, Drafter]) -> OfferedDrafters:
    """A drafter, those that a request may name instead, and predictions with each of them."""
    predicted = {id(drafter): PredictedDrafter(drafter) for drafter in (default, *by_name.values())}
    return OfferedDrafters(predicted[id(default)], {name: predicted[id(d)] for name, d in by_name.items()})


def trained_folder(spec: str) -> Path:
    """Where a trained drafter of this name would lie: in the package, or wherever the user says."""
    return TRAINED / spec if spec in SHIPPED else Path(spec).expanduser()


def load_trained(
    path: str | Path, tree: str | None, target: Checkpoint, config: EngineConfig, *, allow_pickle: bool
) -> Drafter:
    """A network trained for the target, recognised from its files."""
    files = open_drafter(path, allow_pickle=allow_pickle)
    with misfit_explained(files, target):
        return _load_files(path, files, tree, target, config)


def _load_files(
    path: str | Path, files: DrafterFiles, tree: str | None, target: Checkpoint, config: EngineConfig
) -> Drafter:
    layout = recognise(files)
    if layout == Layout.STUDENT:
        return student_drafter(student_words(files, target), tree, config)
    if layout == Layout.LANGUAGE_MODEL:
        return load_model_drafter(open_checkpoint(path, config.impl), tree, target, config)
    if layout == Layout.PARD:
        return load_parallel(open_checkpoint(path), files.config, tree, target, config)
    if layout == Layout.MASKED_STUDENT:
        return load_parallel(student_words(files, target), files.config, tree, target, config)
    words = TargetEmbeddings(target, config.torch_device(), config.torch_dtype())
    net = build_net(files, target.config, words)
    self_test(net, words)
    return drafter_of(net, words, build_grower(tree or usual_tree(type(net), words.device)))


@dataclass(frozen=True)
class UsualTree:
    """The tree a network gets where none is asked for: more guesses cost a CPU time, and a GPU hardly any."""

    on_cpu: str
    on_gpu: str


USUAL: Mapping[type, UsualTree] = {
    Eagle3: UsualTree("chain:depth=5", "beam:nodes=63,width=6,depth=6"),
    BlockNet: UsualTree("chain:depth=6", "beam:nodes=63,width=6,depth=6"),
    HeadStack: UsualTree("static:widths=3x2x1", "beam:nodes=63,width=16,depth=4"),
    ParallelEagle: UsualTree("chain:depth=8", "chain:depth=8"),
    Kangaroo: UsualTree("chain:depth=5", "chain:depth=5"),
    MaskedStudent: UsualTree("chain:depth=8", "chain:depth=8"),
    SubstituteDrafter: UsualTree("best-first:nodes=64,width=8,forwards=8", "best-first:nodes=512,width=32,forwards=16"),
}


def usual_tree(kind: type, device: torch.device) -> str:
    """For a network of this kind."""
    usual = USUAL.get(kind, UsualTree(DEFAULT_TREE, DEFAULT_TREE))
    return usual.on_gpu if device.type == "cuda" else usual.on_cpu


def load_parallel(
    checkpoint: Checkpoint, given: Mapping[str, Any], tree: str | None, target: Checkpoint, config: EngineConfig
) -> ParallelDrafter:
    """A language model that guesses behind masks."""
    check_same_vocabulary(checkpoint, target)
    mask = given.get("pard_token")
    if not isinstance(mask, int) or not 0 <= mask < checkpoint.config.vocab_size:
        raise IncompatibleParts(f"'{checkpoint.name}' names no mask of its vocabulary: its pard_token is {mask!r}.")
    guesses = (given.get("draftwood") or {}).get("guesses", GUESSES)
    grower = build_grower(tree or f"chain:depth={guesses}")
    return ParallelDrafter(load_runner(checkpoint, config), grower, mask, guesses)


def load_model_drafter(
    checkpoint: Checkpoint, tree: str | None, target: Checkpoint, config: EngineConfig
) -> ModelDrafter:
    """A second model as drafter, once it is known to speak the target's vocabulary."""
    grower = build_grower(tree or DEFAULT_TREE)
    check_same_vocabulary(checkpoint, target)
    return ModelDrafter(load_runner(checkpoint, config), grower)


def student_drafter(student: SharedWords, tree: str | None, config: EngineConfig) -> StudentDrafter:
    """A model that speaks with the target's own words, as drafter."""
    grower = build_grower(tree or DEFAULT_TREE)
    return StudentDrafter(student, load_runner(student, config), grower)


def load_runner(
    checkpoint: Checkpoint, config: EngineConfig, progress: Progress = lambda *_: None, offload: float = 0.0
) -> ModelRunner:
    """A model with a cache, as the configuration wants both; of a target, layers may be away."""
    runner = ModelRunner.load(
        checkpoint,
        config.torch_dtype(),
        config.torch_device(),
        config.num_pages,
        config.page_size,
        config.weight_format(),
        progress,
        config.strict,
        offload,
    )
    checkpoint.forget()
    give_back_memory()
    if config.strict:
        require_strict(runner.model)
    return runner


def check_same_vocabulary(draft: Checkpoint, target: Checkpoint) -> None:
    """Refuse a draft model whose token ids mean something else."""
    if draft.config.vocab_size == target.config.vocab_size and (
        draft.tokenizer().fingerprint == target.tokenizer().fingerprint
    ):
        return
    raise IncompatibleParts(
        f"'{draft.name}' cannot draft for '{target.name}': their vocabularies differ ({draft.config.vocab_size} and "
        f"{target.config.vocab_size} entries), so a token of one means nothing to the other. Take a draft model of the "
        "same family, or a drafter that needs no model, such as ngram."
    )
