"""Drafters without weights by name, `ngram:nodes=8`, and what a combination is made of: `combined:eagle3+suffix`.

`combined` may have members with weights; these are loaded in `assembly.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from draftwood.drafters.combined import CombinedDrafter
from draftwood.drafters.lookahead import LookaheadDrafter
from draftwood.drafters.lookup import LookupDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.recycling import RecyclingDrafter
from draftwood.drafters.rest import RestDrafter
from draftwood.drafters.suffix import SuffixDrafter
from draftwood.drafting import Drafter
from draftwood.entries import Entry, split_spec
from draftwood.errors import InvalidRequest

CPU, GPU = torch.device("cpu"), torch.device("cuda")
COMBINED = "combined"
CHOICE = "choice"  # each request has the one of several that gains it most


def _ngram_on_gpu(nodes: int, longest: int, shortest: int, branches: int) -> Drafter:
    """One branch is looked up there; several are the host's."""
    if branches > 1:
        return NgramDrafter(nodes, longest, shortest, branches)
    return LookupDrafter(nodes, longest, shortest)


def build_member(spec: str, nodes: int, least: float, device: torch.device) -> Drafter:
    """A lookup as one of several, for so many nodes; where they agree, less likely ones may be likely enough."""
    entry = LOOKUPS[_kind(spec)].on(device)
    name, settings = split_spec(spec, entry.unnamed)
    branches = 1 if device.type == "cuda" else 2  # one is looked up there
    usual = {"nodes": nodes, "least": least / 2, "branches": branches}
    shared = {key: value for key, value in usual.items() if key in entry.defaults}
    return replace(entry, defaults={**entry.defaults, **shared}).build("drafter", name, settings)


def _kind(spec: str) -> str:
    return spec.partition(":")[0]


def _combined(sources: str, nodes: int, least: float, device: torch.device) -> CombinedDrafter:
    names = _names(sources)
    return CombinedDrafter({name: build_member(name, nodes, least, device) for name in names}, nodes, least)


def _names(sources: str) -> list[str]:
    names = sources.split("+")
    if len(set(names)) < max(len(names), 2) or {"", "none", COMBINED, CHOICE} & {_kind(name) for name in names}:
        raise ValueError(f"'{sources}' should be different drafters joined by +, such as suffix+recycling")
    return names


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
    "lookahead": Entry(
        LookaheadDrafter,
        {"width": 5, "length": 4, "guesses": 5},
        "n-grams that the target itself makes of guesses beside the text (Jacobi): many rows a step",
        on_gpu={"width": 7, "length": 5, "guesses": 7},
    ),
    "rest": Entry(
        RestDrafter,
        {"path": "", "nodes": 8, "longest": 16, "shortest": 2, "least": 0.2},
        "a tree of what followed the last tokens in files of yours (draftwood datastore build)",
        on_gpu={"nodes": 15, "least": 0.02},
        unnamed="path",
    ),
    "combined": Entry(
        partial(_combined, device=CPU),
        {"sources": "suffix+recycling", "nodes": 8, "least": 0.2},
        "several drafters' trees as one, by how often each is right: combined:eagle3+suffix+recycling,nodes=31",
        on_gpu={"nodes": 15, "least": 0.02},
        make_on_gpu=partial(_combined, device=GPU),
        unnamed="sources",
    ),
}


def is_lookup(drafter: str) -> bool:
    """Whether the name is that of a drafter without weights, which makes its own trees."""
    return _kind(drafter) in LOOKUPS and all(_kind(source) in LOOKUPS for source in combined_sources(drafter))


def build_lookup(spec: str, device: torch.device) -> Any:
    """A drafter without weights by name, with the settings that are usual on a device."""
    entry = LOOKUPS[_kind(spec)].on(device)
    name, settings = split_spec(spec, entry.unnamed)
    return entry.build("drafter", name, settings)


def combined_sources(spec: str) -> list[str]:
    """The drafters that a combination is made of; none if it is not one."""
    if _kind(spec) != COMBINED:
        return []
    sources = _settings(spec).get("sources") or str(LOOKUPS[COMBINED].defaults["sources"])
    try:
        return _names(sources)
    except ValueError as error:
        raise InvalidRequest(f"The drafter '{spec}' cannot be built: {error}.") from error


def chosen_from(spec: str) -> list[str]:
    """The drafters from which one is chosen for each request; none if one drafts for all."""
    kind, _, names = spec.partition(":")
    if kind != CHOICE:
        return []
    try:
        return _names(names)
    except ValueError as error:
        raise InvalidRequest(f"The drafter '{spec}' cannot be built: {error}.") from error


def members_of(spec: str) -> list[str]:
    """All drafters that a name stands for, where it stands for several."""
    return combined_sources(spec) or chosen_from(spec)


def room_of(spec: str, nodes: int, least: float) -> tuple[int, float]:
    """How many nodes a combination shall have, and how likely they have to be: what it says, or these."""
    settings = _settings(spec)
    try:
        return int(settings.get("nodes", nodes)), float(settings.get("least", least))
    except ValueError as error:
        raise InvalidRequest(f"The drafter '{spec}' wants a whole number of nodes and a chance: {error}.") from error


def _settings(spec: str) -> dict[str, str]:
    entry = LOOKUPS[COMBINED]
    settings = split_spec(spec, entry.unnamed)[1]
    unknown = settings.keys() - entry.defaults.keys()
    if unknown:
        raise InvalidRequest(
            f"The drafter '{COMBINED}' has no setting '{min(unknown)}' (it has: {', '.join(entry.defaults)})."
        )
    return settings
