"""Tables of what can be had by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from draftwood.costs import StepCosts
from draftwood.model import store


def models_table() -> Table:
    """Models we can fetch."""
    table = _table("Name", "Here", "Needs", "Licence", "What it is")
    for model in store.installed_models():
        here = "no" if model.path is None else "yes"
        table.add_row(model.alias, here, model.needs, model.licence, model.description)
    return table


def parts_tables() -> Iterator[Table]:
    """Drafters, trees, weight formats, controllers and laws."""
    from draftwood.assembly import LOOKUPS, MODEL_DRAFTER, SHIPPED, SHIPPED_SAYS, SUBSTITUTE, TREES
    from draftwood.drafters.cascade import CASCADE
    from draftwood.drafters.remote import REMOTE, REMOTE_DRAFTER
    from draftwood.drafters.self_drafts import SELF_DRAFTS
    from draftwood.engine.policies import POLICIES
    from draftwood.model.weights import FORMATS, ON_ACCELERATORS

    drafters = _table("Name", "Settings", "Guesses", title="Drafters (--drafter)")
    for name, entry in LOOKUPS.items():
        drafters.add_row(name, _settings(entry.defaults, entry.on_gpu), entry.description)
    drafters.add_row(
        "choice:A+B", "--tree", "for each request the one of several that gains it most: choice:eagle3+ngram"
    )
    drafters.add_row("cascade", _settings(CASCADE.defaults), CASCADE.description)
    for name, entry in SELF_DRAFTS.items():
        drafters.add_row(name, f"--tree, {_settings(entry.defaults)}", entry.description)
    drafters.add_row(MODEL_DRAFTER, "--tree", "what a smaller model of the same vocabulary says")
    drafters.add_row(REMOTE_DRAFTER, _settings(REMOTE.defaults, REMOTE.on_gpu), REMOTE.description)
    drafters.add_row(SUBSTITUTE, "weights=int4, --tree", "the target itself, offloaded layers in low bits")
    for name in SHIPPED:
        drafters.add_row(name, "--tree", f"{SHIPPED_SAYS[name]}; in this package, trained for smollm2")
    drafters.add_row("FOLDER or hub id", "--tree", "a trained network in any of the published layouts")
    yield drafters
    trees = _table("Name", "Settings", "Shape", title="Trees (--tree, with models and trained networks)")
    for name, entry in TREES.items():
        trees.add_row(name, _settings(entry.defaults), entry.description)
    yield trees
    formats = _table("Name", "What is stored", "Where", title="Weights (--weights)")
    for name, kind in {**FORMATS, **ON_ACCELERATORS}.items():
        places = [place for place, there in (("CPU", FORMATS), ("GPU", ON_ACCELERATORS)) if name in there]
        formats.add_row(name, kind.says, ", ".join(places))
    yield formats
    policies = _table("Name", "Settings", "How much is guessed in a step", title="Controllers (--controller)")
    for name, entry in POLICIES.items():
        policies.add_row(name, _settings(entry.defaults), entry.description)
    yield policies
    yield laws_table()


def laws_table() -> Table:
    """Every law: what it is, what it is exact for and whether it is lossless."""
    from draftwood.verifiers import LAWS

    columns = ("Name", "Lossless", "Made for", "Settings", "What it keeps")
    laws = _table(*columns, title="Acceptance laws (--law)")
    for name, entry in LAWS.items():
        law = entry()
        laws.add_row(name, "yes" if law.lossless else "NO", str(law.scope), _settings(entry.defaults), entry.says)
    return laws


def costs_table(costs: StepCosts) -> Table:
    """Milliseconds of a step, and how many steps of one row that is."""
    table = Table("Rows", *(f"{context} tokens of context" for context in costs.contexts))
    single = [costs.at(1, context) for context in costs.contexts]
    for rows in costs.rows:
        times = [costs.at(rows, context) for context in costs.contexts]
        cells = [f"{1e3 * t:7.2f} ms  {t / one:5.2f}×" for t, one in zip(times, single, strict=True)]
        table.add_row(str(rows), *cells)
    return table


def _table(first: str, *others: str, title: str | None = None) -> Table:
    """Nothing in it is cut off: names stay whole, and what is too long for a narrow terminal goes on below."""
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for other in others:
        table.add_column(other, overflow="fold")
    return table


def _settings(defaults: Mapping[str, Any], on_gpu: Mapping[str, Any] | None = None) -> str:
    others = {key: f" ({_spelled(value)} on a GPU)" for key, value in (on_gpu or {}).items()}
    return ", ".join(f"{key}={_spelled(value)}{others.get(key, '')}" for key, value in defaults.items()) or "-"


def _spelled(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
