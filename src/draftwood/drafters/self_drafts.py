"""Drafters made of the target itself, by name: which part of it each runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from draftwood.drafters.skips import require_skips
from draftwood.drafters.view import View, Window, first_layers, without_layers
from draftwood.entries import Entry
from draftwood.errors import IncompatibleParts
from draftwood.machine import give_back_memory
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.runner import Model, load_model
from draftwood.model.spec import Sublayers
from draftwood.model.transformer import Transformer
from draftwood.model.weights import FORMATS

SINKS = 4  # tokens at the beginning that a windowed draft reads in any case: a whole page, in fact
ViewOf = Callable[[Checkpoint], View]  # of a model that lies there


def _early_exit(layers: int, window: int) -> ViewOf:
    if layers < 0:
        raise ValueError("layers counts those that a draft runs; 0 is a third of them")
    part = View(first_layers(layers), window=_window(window))
    return lambda checkpoint: part


def _layer_skip(
    skip: tuple[int, ...], attention: tuple[int, ...], mlp: tuple[int, ...], trials: int, window: int
) -> ViewOf:
    seen, given = _window(window), (skip, attention, mlp)
    if trials < 0 or (trials and any(given)):
        raise ValueError("trials looks for what is left out: give no skip, attention or mlp beside it")

    def without(checkpoint: Checkpoint) -> View:
        if trials:
            return View(window=seen, trials=trials)
        layers, attending, mlps = given if any(given) else require_skips(checkpoint).sets
        return View(without_layers(layers), None, seen, Sublayers(frozenset(attending), frozenset(mlps)))

    return without


def _rounded(on_cpu: str, on_gpu: str) -> Callable[[int], ViewOf]:
    """A copy of all weights in a smaller format; on a CPU inputs of products are rounded, too, which is faster."""

    def of(checkpoint: Checkpoint) -> Callable[[Model], Model]:
        def rounded(target: Model) -> Model:
            form = FORMATS[on_cpu if target.device.type == "cpu" else on_gpu]
            if target.weights.name == form.name:
                raise IncompatibleParts(
                    f"The target's weights are {form.name} already, as those of the draft would be: it would gain "
                    "nothing. Take another drafter, or a target that is stored as it is (--weights stored)."
                )
            model = load_model(checkpoint, target.dtype, target.device, form)
            checkpoint.forget()
            give_back_memory()
            return model

        return rounded

    def part(window: int) -> ViewOf:
        seen = _window(window)
        return lambda checkpoint: View(changed=of(checkpoint), window=seen)

    return part


def _component() -> ViewOf:
    return lambda checkpoint: View(changed=_without_attention)


def _without_attention(target: Model) -> Model:
    if not isinstance(target, Transformer):  # recurrent layers run there alone
        raise IncompatibleParts("This drafter runs the recurrent layers of its target, and this target has none.")
    return target.without_attention()


def _windowed(recent: int, sinks: int) -> ViewOf:
    window = Window(sinks, recent)
    return lambda checkpoint: View(window=window)


def _hot_experts(experts: int, window: int) -> ViewOf:
    if experts < 0:
        raise ValueError("experts counts those of each layer that a draft runs; 0 is half as many as a row goes to")
    part = View(window=_window(window), experts=experts)
    return lambda checkpoint: part


def _window(recent: int) -> Window | None:
    if recent < 0:
        raise ValueError("window counts tokens; 0 reads all of the text")
    return Window(SINKS, recent) if recent else None


COPIES = {"self-int8": "int8", "self-int4": "int4"}  # of all weights, in a format that accelerators have, too


def is_self_draft(drafter: str) -> bool:
    """Whether the name is that of a part of the target itself."""
    return drafter.partition(":")[0] in SELF_DRAFTS


def copied_as(drafter: object) -> str | None:
    """The format of the second copy of the target's weights that a drafter of this name holds, if it does."""
    return COPIES.get(drafter.partition(":")[0]) if isinstance(drafter, str) else None


SELF_DRAFTS: Mapping[str, Entry] = {
    "early-exit": Entry(
        _early_exit,
        {"layers": 0, "window": 0},
        "the target's own first layers, then its head (layers=0: a third); pays for models trained to exit early",
    ),
    "layer-skip": Entry(
        _layer_skip,
        {"skip": (), "attention": (), "mlp": (), "trials": 0, "window": 0},
        "the target without some layers: skip=10x11x12, or attention=3x4 and mlp=7 of some alone; what "
        "`draftwood search-skip` has found; or trials=64 of sets while it answers",
    ),
    "hot-experts": Entry(
        _hot_experts,
        {"experts": 0, "window": 0},
        "a mixture with the experts that its text used most lately (experts=0: half as many as a row goes to)",
    ),
    "self-int8": Entry(
        _rounded("w8a8", COPIES["self-int8"]), {"window": 0}, "the target with 8-bit weights; itself it stays exact"
    ),
    "self-int4": Entry(
        _rounded("w4a8", COPIES["self-int4"]), {"window": 0}, "the target with 4-bit weights; itself it stays exact"
    ),
    "component": Entry(
        _component,
        {},
        "the recurrent layers and MLPs of a hybrid target, without its attention; best where both stand side by side",
    ),
    "window": Entry(
        _windowed, {"recent": 1024, "sinks": SINKS}, "the target, reading only the beginning and the end of long texts"
    ),
}
