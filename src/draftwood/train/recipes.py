"""Drafters by name: what network a target gets, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.errors import InvalidRequest
from draftwood.model.config import ModelConfig
from draftwood.nets.dflash import BlockNet, BlockSpec, Confidence, HiddenCorrection, Markov
from draftwood.nets.eagle import Eagle1, Eagle3, Eagle3Spec, MultiToken
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.medusa import HeadStack
from draftwood.nets.pard import Ahead, ParallelEagle
from draftwood.nets.parts import DraftHead, LowRankHead, VocabularyHead
from draftwood.nets.student import MaskedStudent, Student
from draftwood.train.grading import Fixed, Paced, Weighing
from draftwood.train.losses import Mix, decay
from draftwood.train.masked import MaskedMethod, ParallelEagleMethod
from draftwood.train.methods import BlockMethod, HeadStackMethod, RecurrentMethod, ShallowMethod, StudentMethod
from draftwood.train.teacher import Teacher

Made = BlockMethod | HeadStackMethod | MaskedMethod | ParallelEagleMethod | RecurrentMethod | StudentMethod
WEIGHINGS: Mapping[str, Callable[[int], Weighing]] = {  # of so many slots
    "decay": lambda slots: Fixed(decay(slots, 4.0)),
    "dpace": lambda slots: Paced(),
}
TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Target:
    """What a recipe may know of the model it drafts for."""

    config: ModelConfig
    words: TargetEmbeddings
    tokens: Tensor | None  # [R] those it may guess; None: all
    weight: Callable[[str], Tensor | None] = lambda name: None  # its own, by the names of Llama checkpoints

    def stack(self, layers: int) -> ModelConfig:
        """Layers like the target's own."""
        return self.config.with_layers(layers)

    def spread(self, count: int) -> tuple[int, ...]:
        """So many of its layers, from the second to the third last."""
        last = max(self.config.num_layers - 3, 1)
        return tuple(sorted({round(1 + i * (last - 1) / max(count - 1, 1)) for i in range(count)}))

    @torch.no_grad()
    def begin_as(self, name: str, module: nn.Module) -> None:
        """Start a module with the weights of one of the target's, as far as names and shapes agree."""
        for part, weight in module.named_parameters():
            found = self.weight(f"model.{name}.{part}")
            if found is not None and found.shape == weight.shape:
                weight.copy_(found)

    def head(self, rank: int = 0) -> VocabularyHead:
        """Rows of its own head; with a rank, a narrow one of the draft's own."""
        if rank:
            narrow = LowRankHead(self.config.hidden_size, rank, self.config.vocab_size)
            narrow.start_from(self.words.head())
            return narrow
        return DraftHead(self.words.head(self.tokens), self.tokens, self.config.vocab_size, own=False)


@dataclass(frozen=True)
class Recipe:
    """A kind of network with its settings."""

    make: Callable[..., nn.Module]
    method: Callable[..., Made]
    settings: Mapping[str, Any]  # of the network
    loss: Mapping[str, float]
    describe: str
    training: Mapping[str, Any] = field(default_factory=dict)  # settings of how it learns
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of settings that are words
    whole_vocabulary: bool = False  # it cannot be kept from guessing rare tokens, so it has to learn them too

    def build(self, target: Target, settings: Mapping[str, Any]) -> nn.Module:
        """The network, untrained."""
        every = self.complete(settings)
        return self.make(target, **{name: every[name] for name in self.settings})

    @property
    def defaults(self) -> dict[str, Any]:
        """All settings, of the network and of how it learns."""
        return {**self.settings, **self.training}

    def complete(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """All settings, those given checked and the others by default."""
        for name, value in settings.items():
            if name not in self.defaults:
                raise InvalidRequest(f"There is no setting '{name}' here: choose of {', '.join(self.defaults)}.")
            default = self.defaults[name]
            if name in self.choices and value not in self.choices[name]:
                raise InvalidRequest(f"{name} is one of {', '.join(self.choices[name])}, not '{value}'.")
            if type(default) is int and value < min(default, 1):
                raise InvalidRequest(f"{name} must be at least {min(default, 1)}, not {value}.")
        return {**self.defaults, **settings}

    def parse(self, texts: Sequence[str]) -> dict[str, Any]:
        """Settings written `layers=2`, several with commas between them, in the types of their defaults."""
        settings: dict[str, Any] = {}
        for part in filter(None, (part.strip() for text in texts for part in text.split(","))):
            name, equals, text = (piece.strip() for piece in part.partition("="))
            if not equals or not text:
                raise InvalidRequest(f"'{part}' is no setting: write name=value, such as layers=2.")
            settings[name] = self._value(name, text)
        self.complete(settings)
        return settings

    def _value(self, name: str, text: str) -> Any:
        default = self.defaults.get(name, "")
        try:
            return TRUTHS[text.lower()] if isinstance(default, bool) else type(default)(text)
        except (KeyError, ValueError):
            kind = {bool: "true or false", float: "a number"}.get(type(default), "a whole number")
            raise InvalidRequest(f"{name} is {kind}, not '{text}'.") from None


def _eagle3(target: Target, layers: int, reads: int, rank: int, normed: bool) -> Eagle3:
    config = target.config
    chosen = (1, config.num_layers // 2 - 1, config.num_layers - 4) if reads == 3 else target.spread(reads)
    chosen = tuple(sorted({min(max(layer, 0), config.num_layers - 1) for layer in chosen}))
    spec = Eagle3Spec(chosen, config.hidden_size, norm_before_residual=True, norm_output=normed, fc_norm=normed)
    return Eagle3(target.stack(layers), spec, target.head(rank))


def _eagle1(target: Target, layers: int) -> Eagle1:
    return Eagle1(target.stack(layers), target.config.num_layers - 1, target.head(), bias=True)


def _peagle(target: Target, layers: int, reads: int, guesses: int) -> ParallelEagle:
    """The vocabulary's last token is its mask, as a student's."""
    whole = _eagle3(target, layers, reads, 0, False)
    ahead = Ahead(target.config.vocab_size - 1, guesses)
    return ParallelEagle(whole.config, whole.spec, whole.head, ahead)


def _block(
    target: Target, layers: int, reads: int, size: int, rank: int, correction: str, confidence: bool
) -> BlockNet:
    config, head = target.config, target.head()
    spec = BlockSpec(target.spread(reads), config.hidden_size, size, None)
    table = Markov(config.vocab_size, head.size, rank) if correction == "markov" else None
    hidden = HiddenCorrection(config, head, rank) if correction == "hidden" else None
    sure = Confidence(config.hidden_size, table) if confidence else None
    return BlockNet(target.stack(layers), spec, head, table or hidden, sure)


def _block_method(net: BlockNet, *others: Any, anchors: int, weights: str) -> BlockMethod:
    return BlockMethod(net, *others, anchors=anchors, weigh=WEIGHINGS[weights](net.spec.guesses))


def _heads(target: Target, heads: int, layers: int, grounded: bool) -> HeadStack:
    shared = target.head()
    config = target.config
    return HeadStack(config.hidden_size, config.num_layers - 1, layers, [shared] * heads, grounded)


def _kangaroo(target: Target, exit_layer: int, layers: int) -> Kangaroo:
    """It begins with the target's last norm, and its attention adds nothing yet."""
    net = Kangaroo(target.stack(layers), min(exit_layer, target.config.num_layers), target.head())
    target.begin_as("norm", net.norm)
    for layer in net.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)  # type: ignore[union-attr,arg-type]
    return net


def _student(target: Target, layers: int) -> Student:
    net = Student(target.stack(layers))
    _begin_as_some_layers(net, target)
    return net


def _pard(target: Target, layers: int, guesses: int) -> MaskedStudent:
    """The vocabulary's last token is its mask: one that pads it, or the rarest of all."""
    net = MaskedStudent(target.stack(layers), target.config.vocab_size - 1, guesses)
    _begin_as_some_layers(net, target)
    return net


def _begin_as_some_layers(net: Student, target: Target) -> None:
    """Of the target's, from the first to the last."""
    layers, last = net.config.num_layers, target.config.num_layers - 1
    for i, layer in enumerate(net.model.layers):  # type: ignore[arg-type]
        target.begin_as(f"layers.{round(i * last / max(layers - 1, 1))}", layer)
    target.begin_as("norm", net.model.norm)  # type: ignore[arg-type]


RECIPES: Mapping[str, Recipe] = {
    "eagle3": Recipe(
        _eagle3,
        RecurrentMethod,
        {"layers": 1, "reads": 3, "rank": 0, "normed": True},
        {"kl": 1.0},
        "one layer on fused features of three of the target's, trained on its own outputs",
        {"steps": 5},
    ),
    "peagle": Recipe(
        _peagle,
        ParallelEagleMethod,
        {"layers": 2, "reads": 3, "guesses": 8},
        {"kl": 1.0},
        "EAGLE-3 that guesses several tokens in one pass, behind masks (P-EAGLE)",
        {"keep": 0.7, "least": 0.2},
    ),
    "eagle": Recipe(
        _eagle1,
        RecurrentMethod,
        {"layers": 1},
        {"kl": 1.0},
        "EAGLE-1: predicts the target's last feature",
        {"steps": 5},
    ),
    "block": Recipe(
        _block,
        _block_method,
        {"layers": 2, "reads": 5, "size": 6, "rank": 64, "correction": "markov", "confidence": True},
        {"ce": 0.1, "tv": 0.9},
        "a whole block in one pass, each slot corrected for the token before it (DSpark)",
        {"anchors": 64, "weights": "decay"},
        {"correction": ("markov", "hidden", "none"), "weights": tuple(WEIGHINGS)},
    ),
    "medusa": Recipe(
        _heads,
        HeadStackMethod,
        {"heads": 4, "layers": 1, "grounded": False},
        {"kl": 1.0},
        "a head a token",
    ),
    "hydra": Recipe(
        _heads,
        HeadStackMethod,
        {"heads": 3, "layers": 2, "grounded": True},
        {"kl": 1.0},
        "heads that see the path they are on",
    ),
    "kangaroo": Recipe(
        _kangaroo,
        ShallowMethod,
        {"exit_layer": 2, "layers": 1},
        {"kl": 1.0},
        "an attention on the target's own first layers, which draft together",
    ),
    "student": Recipe(
        _student,
        StudentMethod,
        {"layers": 4},
        {"kl": 1.0},
        "a small language model between the target's own words",
        whole_vocabulary=True,
    ),
    "pard": Recipe(
        _pard,
        MaskedMethod,
        {"layers": 4, "guesses": 8},
        {"ce": 0.1, "kl": 1.0},
        "the same, guessing several tokens at once behind masks (PARD)",
        {"keep": 0.7, "least": 0.2},
        whole_vocabulary=True,
    ),
}
OTHER_NAMES: Mapping[str, str] = {"distill": "student"}
RECIPE_OF: Mapping[type, str] = {
    Eagle3: "eagle3",
    ParallelEagle: "peagle",
    Eagle1: "eagle",
    MultiToken: "eagle",
    BlockNet: "block",
    Kangaroo: "kangaroo",
    Student: "student",
    MaskedStudent: "pard",
}


def find_recipe(name: str) -> tuple[str, Recipe]:
    """A recipe by its name or another one, with its own name."""
    own = OTHER_NAMES.get(name, name)
    if own not in RECIPES:
        raise InvalidRequest(f"There is no method '{name}': choose one of {', '.join((*RECIPES, *OTHER_NAMES))}.")
    return own, RECIPES[own]


def build_method(
    name: str,
    target: Target,
    teacher_of: Callable[[tuple[int, ...]], Teacher],
    settings: Mapping[str, Any],
    mix: Mix | None = None,
) -> Made:
    """A network and how it learns, by name."""
    _, recipe = find_recipe(name)
    net = recipe.build(target, settings).to(target.words.device)
    return method_of(recipe, net, target, teacher_of, mix, settings)


def method_of(
    recipe: Recipe,
    net: nn.Module,
    target: Target,
    teacher_of: Callable[[tuple[int, ...]], Teacher],
    mix: Mix | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Made:
    """How a network that is there already learns."""
    reads = getattr(net, "reads", ())
    arguments = [net, teacher_of(reads), target.words, mix or Mix(recipe.loss)]
    if isinstance(net, Student):
        arguments.insert(1, target.head())
    every = recipe.complete(settings)
    return recipe.method(*arguments, **{name: every[name] for name in recipe.training})


def recipe_of(net: nn.Module) -> Recipe:
    """The one that makes networks of this kind, however this one was made."""
    if isinstance(net, HeadStack):
        return RECIPES["hydra" if net.grounded else "medusa"]
    if type(net) not in RECIPE_OF:
        raise InvalidRequest(f"There is no training recipe for a {type(net).__name__}.")
    return RECIPES[RECIPE_OF[type(net)]]


def num_parameters(net: nn.Module) -> int:
    """Trained numbers."""
    return sum(parameter.numel() for parameter in net.parameters())
