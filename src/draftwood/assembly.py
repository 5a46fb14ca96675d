"""From names to parts: `ngram:nodes=8`, `beam:nodes=16,width=4`, `model:PATH`. The only place that knows them all.

A name may carry settings behind a colon, separated by commas; `draftwood parts` lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftwood.config import EngineConfig
from draftwood.drafters.across import way_across
from draftwood.drafters.by_request import OfferedDrafters
from draftwood.drafters.cascade import CASCADE, build_cascade
from draftwood.drafters.combined import CombinedDrafter
from draftwood.drafters.intersection import Bridge, IntersectionDrafter
from draftwood.drafters.lookups import LOOKUPS, build_lookup, build_member, combined_sources, is_lookup, room_of
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.pard import GUESSES, ParallelDrafter
from draftwood.drafters.predicted import PredictedDrafter
from draftwood.drafters.reencoding import ReencodingDrafter
from draftwood.drafters.remote import REMOTE, build_remote
from draftwood.drafters.rest import RestDrafter
from draftwood.drafters.self_drafts import SELF_DRAFTS, is_self_draft
from draftwood.drafters.student import StudentDrafter
from draftwood.drafters.substitute import SubstituteDrafter
from draftwood.drafters.trained import DEFAULT_TREE, drafter_of, usual_tree
from draftwood.drafters.view import ViewDrafter
from draftwood.drafting import Drafter, Grower
from draftwood.entries import Entry, split_spec
from draftwood.errors import IncompatibleParts, InvalidRequest
from draftwood.growers import (
    Beam,
    Best,
    BestFirst,
    ChildPicker,
    Coupled,
    Greedy,
    Hybrid,
    Independent,
    Levels,
    Paths,
    WithoutReplacement,
    sequoia,
)
from draftwood.machine import give_back_memory
from draftwood.model.checkpoint import HUB_ID, Checkpoint, open_checkpoint
from draftwood.model.encoders import check_reads_as_much
from draftwood.model.native import Progress
from draftwood.model.runner import ModelRunner, require_strict
from draftwood.model.weights import FORMATS
from draftwood.nets.embeddings import TargetEmbeddings
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
from draftwood.nets.shared import SharedWords
from draftwood.protocols import Verifier
from draftwood.tree import DraftLaw
from draftwood.verifiers import AUTO, LAWS, ByRequest, default_law

CPU = torch.device("cpu")
log = logging.getLogger(__name__)
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
    "sequoia": Entry(
        sequoia,
        {"nodes": 15, "depth": 5, "rates": (60, 15, 8, 4)},
        "Sequoia: the best drawn shape where so many of 100 first, second and further children are accepted",
    ),
    "greedy": Entry(
        Greedy, {"nodes": 12, "forwards": 4}, "DySpec: drawn without repeating, wherever the next draw is likeliest"
    ),
    "paths": Entry(
        Paths, {"paths": 2, "depth": 4, "trunk": 0}, "independent paths, merged where they agree, behind a common trunk"
    ),
    "coupled": Entry(_levels(Coupled()), {"widths": (1, 1, 1, 1)}, "what the target's own noise makes of the draft"),
    "hybrid": Entry(_levels(Hybrid()), {"widths": (2, 2, 1)}, "the likeliest children and one drawn from the rest"),
}


MODEL_DRAFTER = "model:NAME"
SUBSTITUTE = "subspec"  # the target's own layers, low-bit copies of those that are away
SUBSTITUTED = ("int4", "int8")
LEAST_OF_NETWORKS = 0.02  # chance of a node beside those of networks, whose trees are not cut by chance either


def makes_own_trees(drafter: str) -> bool:
    """Whether the name is that of a drafter for which no tree can be asked."""
    return is_lookup(drafter) or drafter.partition(":")[0] in ("cascade", "remote")


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
    return "coupled" if law == "coupled" and not makes_own_trees(drafter) else None


def build_drafter(
    spec: str, tree: str | None, target: Checkpoint, config: EngineConfig, *, allow_pickle: bool = False
) -> Drafter:
    """A drafter by name; `model:NAME` loads a second model, and a folder whatever was trained and lies there."""
    if combined_sources(spec) and not is_lookup(spec):
        return load_combined(spec, tree, target, config, allow_pickle=allow_pickle)
    if spec.startswith("model:"):
        return load_model_drafter(open_checkpoint(spec.removeprefix("model:"), config.impl), tree, target, config)
    name, _, _ = spec.partition(":")
    if name == "cascade":
        _refuse_tree(tree, name, CASCADE)
        return build_cascade(split_spec(spec)[1], lambda part: build_drafter(part, None, target, config))
    if name == SUBSTITUTE:
        return _substitute(spec, tree, target, config)
    if is_self_draft(spec):
        part = SELF_DRAFTS[name].build("drafter", *split_spec(spec))
        return ViewDrafter(part(target), build_grower(tree or DEFAULT_TREE))
    trained = trained_folder(spec)
    if name not in LOOKUPS and (trained.is_dir() or HUB_ID.fullmatch(spec)):
        return load_trained(trained if trained.is_dir() else spec, tree, target, config, allow_pickle=allow_pickle)
    others = ("cascade", *SELF_DRAFTS, *SHIPPED, MODEL_DRAFTER, SUBSTITUTE, "a folder")
    entry = _entry("drafter", {**LOOKUPS, "remote": REMOTE}, name, others)
    _refuse_tree(tree, name, entry)
    lookup = build_remote(spec, target, config) if name == "remote" else build_lookup(spec, config.torch_device())
    check_datastores(lookup, target)
    return lookup


def _refuse_tree(tree: str | None, name: str, entry: Entry) -> None:
    if tree is not None:
        raise InvalidRequest(
            f"The drafter '{name}' makes its own trees; --tree goes with models and trained networks. "
            f"Its settings are: {', '.join(entry.defaults) or 'none'}."
        )


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


def check_datastores(drafter: Drafter, target: Checkpoint) -> None:
    """Refuse datastores of another vocabulary."""
    members = drafter.sources if isinstance(drafter, CombinedDrafter) else [drafter]
    for member in members:
        if isinstance(member, RestDrafter):
            member.datastore.manifest.require(target.tokenizer())


def load_combined(
    spec: str, tree: str | None, target: Checkpoint, config: EngineConfig, *, allow_pickle: bool
) -> CombinedDrafter:
    """Several drafters' trees as one, some with weights: these get the `tree`, and say how large the whole is."""
    device, names = config.torch_device(), combined_sources(spec)
    with_weights = {
        name: build_drafter(name, tree, target, config, allow_pickle=allow_pickle)
        for name in names
        if not is_lookup(name)
    }
    most = max(drafter.max_nodes for drafter in with_weights.values())
    nodes, least = room_of(spec, most, LEAST_OF_NETWORKS)
    members = {name: with_weights.get(name) or build_member(name, nodes, least, device) for name in names}
    try:
        made = CombinedDrafter(members, nodes, least)
    except ValueError as error:
        raise InvalidRequest(f"The drafter '{spec}' cannot be built: {error}.") from error
    check_datastores(made, target)
    return made


def offer(default: Drafter, by_name: Mapping[str, Drafter], choice: Sequence[str] = ()) -> OfferedDrafters:
    """A drafter, those that a request may name instead, and predictions with each of them; with a `choice`, which
    drafts is decided for each request.
    """
    if sum(by_name[name].reads for name in choice) > 1:
        raise InvalidRequest(
            f"Of {', '.join(choice)} more than one reads texts by itself; choose from one such drafter."
        )
    predicted = {id(drafter): PredictedDrafter(drafter) for drafter in (default, *by_name.values())}
    return OfferedDrafters(predicted[id(default)], {name: predicted[id(d)] for name, d in by_name.items()}, choice)


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


def load_model_drafter(checkpoint: Checkpoint, tree: str | None, target: Checkpoint, config: EngineConfig) -> Drafter:
    """A second model as drafter; how it drafts for a target of another vocabulary is said in the log."""
    grower = build_grower(tree or DEFAULT_TREE)
    check_reads_as_much(checkpoint.name, checkpoint.config.encoder, target.name, target.config.encoder)
    if same_vocabulary(checkpoint, target):
        return ModelDrafter(load_runner(checkpoint, config), grower)
    theirs, size = target.tokenizer(), target.config.vocab_size
    own, own_size = checkpoint.tokenizer(), checkpoint.config.vocab_size
    bridge = Bridge.between(theirs, size, own, own_size)
    way = way_across(bridge, grower)
    log.info("'%s' and '%s' have different vocabularies: it drafts %s.", checkpoint.name, target.name, way.why)
    runner = load_runner(checkpoint, config)
    if way.by_token:
        return IntersectionDrafter(runner, grower, bridge)
    return ReencodingDrafter(runner, own, theirs, size, grower.levels)


def student_drafter(student: SharedWords, tree: str | None, config: EngineConfig) -> StudentDrafter:
    """A model that speaks with the target's own words, as drafter."""
    grower = build_grower(tree or DEFAULT_TREE)
    return StudentDrafter(student, load_runner(student, config), grower)


def load_runner(
    checkpoint: Checkpoint, config: EngineConfig, progress: Progress = lambda *_: None, offload: float = 0.0
) -> ModelRunner:
    """A model with a cache, as the configuration wants both; of a target, layers may be away."""
    give_back_memory()  # of reading the vocabulary
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
        config.num_states,
        config.cache_packing(),
    )
    checkpoint.forget()
    give_back_memory()
    if config.strict:
        require_strict(runner.model)
    return runner


def same_vocabulary(draft: Checkpoint, target: Checkpoint) -> bool:
    """Whether token ids of both mean the same."""
    return draft.config.vocab_size == target.config.vocab_size and (
        draft.tokenizer().fingerprint == target.tokenizer().fingerprint
    )


def check_same_vocabulary(draft: Checkpoint, target: Checkpoint) -> None:
    """Refuse a draft model whose token ids mean something else."""
    if not same_vocabulary(draft, target):
        raise IncompatibleParts(
            f"'{draft.name}' cannot draft for '{target.name}': their vocabularies differ ({draft.config.vocab_size} "
            f"and {target.config.vocab_size} entries), and it was trained to guess behind masks of its own. Take a "
            "drafter made for this model, an ordinary draft model, or one that needs no model, such as ngram."
        )
