"""Tiny random models and a harness that runs an engine on them; shared by all tests that need a whole engine."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.batch import Images, Source
from draftwood.drafters import datastore
from draftwood.drafters.by_request import OfferedDrafters
from draftwood.drafters.combined import CombinedDrafter
from draftwood.drafters.intersection import Bridge, IntersectionDrafter
from draftwood.drafters.model import ModelDrafter
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.pard import ParallelDrafter
from draftwood.drafters.predicted import PredictedDrafter
from draftwood.drafters.recycling import RecyclingDrafter
from draftwood.drafters.rest import RestDrafter
from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafters.student import StudentDrafter
from draftwood.drafters.suffix import SuffixDrafter
from draftwood.drafters.trained import drafter_of
from draftwood.drafters.view import View, ViewDrafter
from draftwood.drafting import Drafter, Grower
from draftwood.engine.controller import FixedBudget
from draftwood.engine.engine import Engine
from draftwood.engine.scheduler import Scheduler, SchedulerConfig
from draftwood.engine.sequence import Sequence as Answer
from draftwood.engine.text import TextStream
from draftwood.engine.worker import Companion
from draftwood.model.checkpoint import expected_shape
from draftwood.model.config import ModelConfig
from draftwood.model.names import tensor_shapes
from draftwood.model.runner import Model, ModelRunner, load_model
from draftwood.model.weights import FORMATS
from draftwood.nets.dflash import BlockNet, BlockSpec, HiddenCorrection, Markov
from draftwood.nets.eagle import Eagle1, Eagle3, Eagle3Spec, MultiToken
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.medusa import HeadStack
from draftwood.nets.pard import Ahead, ParallelEagle
from draftwood.nets.parts import DraftHead
from draftwood.nets.shared import SharedWords
from draftwood.nets.student import Student
from draftwood.ops.packed import Packing
from draftwood.protocols import Budget, Load, Randomness, StepReport, Verifier
from draftwood.request import Event, FinishReason, SamplingParams
from draftwood.rng import KeyedRng
from draftwood.tree import DraftLaw, Draw
from families import RECURRENT

CPU = torch.device("cpu")

HF_CONFIGS = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 6},
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 12},
    "gemma2": {"model_type": "gemma2", "head_dim": 12, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    "olmo2": {"model_type": "olmo2"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 12,
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def hf_config(family: str = "llama", vocab_size: int = 13, layers: int = 2, **changes: object) -> dict[str, object]:
    """A config.json of a family, as small as it gets while every part still matters."""
    return {
        **HF_CONFIGS[family],
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }


def tensor_names(config: ModelConfig) -> list[str]:
    """Every tensor a checkpoint of this config has, by our name for it."""
    return list(tensor_shapes(config))


def _gaussian(name: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    digest = hashlib.blake2b(f"{name}/{seed}".encode(), digest_size=6).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class TinyCheckpoint:
    """Random weights that are a pure function of (name, seed); `noise` mixes another seed in, for a likeness."""

    def __init__(self, config: ModelConfig, seed: int = 0, noise: float = 0.0) -> None:
        self.config = config
        self.name = f"tiny-{config.family}"
        self._seed = seed
        self._noise = noise

    def has(self, name: str) -> bool:
        return name in tensor_names(self.config)

    def tensor(self, name: str) -> Tensor:
        shape = expected_shape(name, self.config)
        assert shape is not None
        assert self.has(name), name
        value = _gaussian(name, self._seed, shape) + self._noise * _gaussian(name, self._seed + 1000, shape)
        if "norm" in name:
            return 1 + 0.1 * value
        # Sharp enough that a wrong mask, slot or position changes the answer.
        if "embed" in name or "lm_head" in name:
            return value * (0.4 if "lm_head" in name else 1.0)
        return value * (1.6 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3)

    def matrix(self, name: str) -> Tensor:
        return self.tensor(name)

    def forget(self) -> None:
        pass

    def tokenizer(self):
        raise NotImplementedError("tiny checkpoints have no texts")


class Idle(TinyCheckpoint):
    """A model two of whose layers do nothing."""

    def tensor(self, name: str) -> Tensor:
        weight = super().tensor(name)
        does_nothing = name.startswith(("model.layers.1.", "model.layers.3.")) and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        )
        return torch.zeros_like(weight) if does_nothing else weight


def tiny_config(family: str = "llama", vocab_size: int = 13, layers: int = 2, **changes: object) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(family, vocab_size, layers, **changes))


def tiny_runner(
    config: ModelConfig | None = None,
    seed: int = 0,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float64,
    num_pages: int = 200,
    page_size: int = 4,
    device: torch.device = CPU,
    weights: str = "stored",
    strict: bool = False,
    packing: Packing | None = None,
) -> ModelRunner:
    checkpoint = TinyCheckpoint(config or tiny_config(), seed, noise)
    form = FORMATS[weights]
    return ModelRunner.load(checkpoint, dtype, device, num_pages, page_size, form, strict=strict, packing=packing)


def tiny_folder(
    path: Path, family: str = "llama", tokenizer: bool = True, noise: float = 0.0, **changes: object
) -> Path:
    """A checkpoint folder on disk: config, safetensors and a byte-level tokenizer with a chat template."""
    backend = byte_tokenizer(("<|end|>",))
    path.mkdir(parents=True, exist_ok=True)
    vocab = backend.get_vocab_size()
    config = hf_config(family, vocab, eos_token_id=vocab - 1, **changes)
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = TinyCheckpoint(ModelConfig.from_hf(config), noise=noise)
    names = tensor_names(checkpoint.config)
    save_file({n: checkpoint.tensor(n).float().contiguous() for n in names}, path / "model.safetensors")
    if tokenizer:
        backend.save(str(path / "tokenizer.json"))
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|end|>"}))
    return path


def byte_tokenizer(special: Sequence[str]) -> Any:
    """A token for every byte, and special ones behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def save_tokenizer(path: Path, special: Sequence[str]) -> int:
    """Without a chat template; how many tokens there are."""
    path.mkdir(parents=True, exist_ok=True)
    backend = byte_tokenizer(special)
    backend.save(str(path / "tokenizer.json"))
    return backend.get_vocab_size()


class LetterDecoder:
    """Token i reads as the i-th letter: texts a person can follow."""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)

    def flush(self) -> str:
        return ""


class NoStutter:
    """A grammar of two rules: no token twice in a row, and every third token is even. Knows nothing but paths."""

    error = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def allowed(self, answer: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        said = [list(answer)]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            said.append([*said[parent], token])
        return torch.stack([self._row(text) for text in said])

    def _row(self, text: Sequence[int]) -> Tensor:
        row = torch.ones(self.vocab_size, dtype=torch.bool)
        if text:
            row[text[-1]] = False
        if len(text) % 3 == 2:
            row[1::2] = False
        return row


@dataclass(frozen=True)
class Ask:
    """One request of a test."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrives: int = 0  # the step before which it is added
    cancelled: int | None = None  # the step before which it is cancelled
    source: Source | None = None  # what an encoder reads before the prompt
    images: Images | None = None  # what stands at the prompt's image tokens


@dataclass(frozen=True)
class Regime:
    """How a schedule is made difficult."""

    max_rows: int = 512
    max_running: int = 64
    num_pages: int = 200
    page_size: int = 4
    groups: int = 1


EASY = Regime()


class Harness:
    """An engine on a tiny target, driven step by step with the integrity of every cache checked after each."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        law: Verifier,
        regime: Regime = EASY,
        rng: Randomness | None = None,
    ) -> None:
        tables = target.cache.tables
        scheduler = Scheduler(tables, SchedulerConfig(regime.max_rows, regime.max_running, groups=regime.groups))
        self.engine = Engine(target, drafter, law, FixedBudget(drafter.max_nodes), scheduler, rng or KeyedRng())
        if isinstance(drafter, OfferedDrafters) and drafter.choice:
            self.engine.controller = Changing(drafter.max_nodes, drafter.choice)
        self.events: list[Event] = []
        self.companion: Companion | None = None

    def answer(self, i: int, ask: Ask, eos: frozenset[int] = frozenset()) -> Answer:
        drafter = self.engine.drafter
        params = drafter.asked_for(i, ask) if isinstance(drafter, Expecting | Offering) else ask.params
        tokens = [*(() if ask.source is None else ask.source.tokens), *ask.prompt]
        return Answer(
            id=i,
            request_id=i,
            index=0,
            tokens=tokens,
            source=ask.source,
            images=ask.images,
            params=params,
            seed=params.seed or 0,
            max_length=min(len(tokens) + params.max_tokens, self.engine.target.model.config.max_positions),
            stop_ids=frozenset(params.stop_token_ids) | eos,
            bad_words=tuple(tuple(ord(c) - ord("a") for c in word) for word in params.bad_words),
            text=TextStream(LetterDecoder(), params.stop),
            arrived=0.0,
            prediction=tuple(ord(c) - ord("a") for c in params.prediction),
            constraint=NoStutter(int(params.grammar)) if params.grammar else None,
            adapter=-1 if params.adapter is None else int(params.adapter),  # its place among the target's
        )

    def run(self, asks: Sequence[Ask]) -> list[Answer]:
        answers = [self.answer(i, ask) for i, ask in enumerate(asks)]
        scheduler = self.engine.scheduler
        for step in itertools.count():
            for ask, answer in zip(asks, answers, strict=True):
                if ask.arrives == step:
                    scheduler.add([answer])
                if ask.cancelled == step:
                    self.events += scheduler.abort(answer.request_id, FinishReason.CANCELLED)
            if scheduler.has_work:
                self.events += (news := self.engine.step())
                self.give_way(news, answers)
            self.check()
            if not scheduler.has_work and all(ask.arrives <= step for ask in asks):
                break
            assert step < 5000, "the engine makes no progress"
        return answers

    def give_way(self, news: Sequence[Event], answers: Sequence[Answer]) -> None:
        """What a worker does behind every step."""
        if self.companion is None:
            return
        for event in news:
            if event.finish_reason is not None:
                self.companion.hear(answers[event.request_id], event.finish_reason)
        if self.companion.wants(busy=True) <= 0:
            self.companion.work()
            self.engine.invalidate_timing()

    def check(self) -> None:
        self.engine.target.cache.tables.check()

    def text(self, i: int) -> str:
        return "".join(event.text for event in self.events if event.request_id == i)

    def finish_reason(self, i: int) -> FinishReason | None:
        return [e.finish_reason for e in self.events if e.request_id == i][-1]


def generated(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens[answer.prompt_length :] for answer in answers]


DraftMaker = Callable[[torch.dtype], Drafter]


def with_model(grower: Grower, noise: float = 0.2, num_pages: int = 200, **model: object) -> DraftMaker:
    """A draft model that is a noisy likeness of the target, or another model altogether."""

    def make(dtype: torch.dtype) -> Drafter:
        config = tiny_config(**model) if model else None  # type: ignore[arg-type]
        return ModelDrafter(tiny_runner(config, noise=noise, dtype=dtype, num_pages=num_pages), grower)

    return make


def with_recurrent(family: str, grower: Grower) -> DraftMaker:
    """A model with recurrent layers, and a grower."""

    def make(dtype: torch.dtype) -> Drafter:
        config = ModelConfig.from_hf({**RECURRENT[family], "max_position_embeddings": 512})
        return ModelDrafter(tiny_runner(config, dtype=dtype), grower)

    return make


def with_bridge(grower: Grower) -> DraftMaker:
    """A likeness of the target that has all tokens but two, and reads others for these."""

    def make(dtype: torch.dtype) -> Drafter:
        common = torch.tensor([token for token in range(13) if token not in (4, 9)])
        read = torch.arange(13).index_copy(0, torch.tensor([4, 9]), torch.tensor([2, 0]))
        return IntersectionDrafter(tiny_runner(noise=0.2, dtype=dtype), grower, Bridge(common, common, read))

    return make


def no_drafter(dtype: torch.dtype) -> Drafter:
    return NoDrafter()


def ngram(**settings: int) -> DraftMaker:
    return lambda dtype: NgramDrafter(**settings)


def suffix(**settings: float) -> DraftMaker:
    return lambda dtype: SuffixDrafter(**settings)  # type: ignore[arg-type]


def recycling(dtype: torch.dtype) -> Drafter:
    return RecyclingDrafter(nodes=7, width=3, depth=4, least=0.01)


@cache
def random_datastore() -> TemporaryDirectory[str]:
    """Tokens that the tiny target has, in no order."""
    folder, rng = TemporaryDirectory(), random.Random(1)
    some = array("i", (rng.randrange(13) for _ in range(3000)))
    datastore._added(Path(folder.name), datastore.Manifest("", 13), some, {})
    return folder


def rest(dtype: torch.dtype) -> Drafter:
    return RestDrafter(random_datastore().name, nodes=7, shortest=1, least=0.0)


def combining(*makers: DraftMaker, nodes: int = 7) -> DraftMaker:
    return lambda dtype: CombinedDrafter([maker(dtype) for maker in makers], nodes, 0.01)


def scripted(script: Callable[[Sequence[int]], Sequence[Sequence[int]]], nodes: int, chain: bool) -> DraftMaker:
    return lambda dtype: ScriptedDrafter(script, nodes, chain=chain)


def with_arrivals(asks: Sequence[Ask], every: int) -> list[Ask]:
    return [replace(ask, arrives=i * every) for i, ask in enumerate(asks)]


def with_masks(grower: Grower, guesses: int = 4, num_pages: int = 200) -> DraftMaker:
    """A likeness of the target that guesses behind masks, which it was never trained for."""
    return lambda dtype: ParallelDrafter(
        tiny_runner(noise=0.2, dtype=dtype, num_pages=num_pages), grower, mask=5, guesses=guesses
    )


def with_view(view: View, grower: Grower) -> DraftMaker:
    """A part of the target."""
    return lambda dtype: ViewDrafter(view, grower)


def rounded(weights: str) -> Callable[[Model], Model]:
    """The tiny target with other weights."""
    return lambda target: load_model(TinyCheckpoint(target.config), target.dtype, target.device, FORMATS[weights])


NETS = {
    "eagle3": lambda config, words: Eagle3(_stack(config, 1), Eagle3Spec((0, 1), config.hidden_size), _head(words)),
    "eagle31": lambda config, words: Eagle3(
        _stack(config, 2), Eagle3Spec((1,), config.hidden_size, True, True, True), _head(words, (0, 3, 4, 7, 11))
    ),
    "peagle": lambda config, words: ParallelEagle(
        _stack(config, 2), Eagle3Spec((0, 1), config.hidden_size), _head(words), Ahead(5, 4)
    ),
    "eagle1": lambda config, words: Eagle1(_stack(config, 1), 1, _head(words), bias=True),
    "mtp": lambda config, words: MultiToken(_stack(config, 1), 1, _head(words)),
    "dflash": lambda config, words: BlockNet(
        _stack(config, 2), BlockSpec((0, 1), config.hidden_size, 4, 5, False), _head(words)
    ),
    "dspark": lambda config, words: BlockNet(
        _stack(config, 1),
        BlockSpec((1,), config.hidden_size, 4, None),
        _head(words, (0, 1, 2, 5, 6, 9)),
        Markov(config.vocab_size, 6, 3),
    ),
    "treeflash": lambda config, words: BlockNet(
        _stack(config, 1),
        BlockSpec((0,), config.hidden_size, 3, 5),
        _head(words),
        HiddenCorrection(config, _head(words), 16),
    ),
    "medusa": lambda config, words: HeadStack(config.hidden_size, 1, 2, [_head(words)] * 3, grounded=False),
    "hydra": lambda config, words: HeadStack(config.hidden_size, 1, 1, [_head(words)] * 3, grounded=True),
    "kangaroo": lambda config, words: Kangaroo(_stack(config, 2), 1, _head(words, (0, 1, 3, 4, 6, 7, 9, 10, 11))),
}


def _stack(config: ModelConfig, layers: int) -> ModelConfig:
    return replace(config, num_layers=layers, windows=(None,) * layers)


def _head(words: TargetEmbeddings, tokens: tuple[int, ...] | None = None) -> DraftHead:
    chosen = None if tokens is None else torch.tensor(tokens)
    return DraftHead(words.head(chosen), chosen, words.config.vocab_size, own=False)


def random_net(kind: str, words: TargetEmbeddings, seed: int = 3) -> torch.nn.Module:
    """A network of some kind with random weights, sharp enough to disagree with itself if anything is misplaced."""
    return randomised(NETS[kind](words.config, words).to(words.device, words.dtype), seed)


def randomised(net: torch.nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return net.requires_grad_(False)


def with_net(
    kind: str, grower: Grower, checkpoint: TinyCheckpoint | None = None, device: torch.device = CPU
) -> DraftMaker:
    """A drafter with a network on the tiny target."""

    def make(dtype: torch.dtype) -> Drafter:
        words = TargetEmbeddings(checkpoint or TinyCheckpoint(tiny_config()), device, dtype)
        return drafter_of(random_net(kind, words), words, grower)

    return make


class Expecting(PredictedDrafter):
    """Every other sequence comes with a prediction: what it will say, with a few tokens wrong, missing or new."""

    def __init__(self, drafter: Drafter, expected: Callable[[Sequence[int]], Sequence[int]]) -> None:
        super().__init__(drafter)
        self.expected = expected

    @property
    def law(self) -> DraftLaw:
        return DraftLaw(self.drafter.law.draws | {Draw.POINT}, chain=False)

    def asked_for(self, i: int, ask: Ask) -> SamplingParams:
        text = "".join(chr(ord("a") + token) for token in self.expected(ask.prompt))
        return replace(ask.params, prediction=text) if i % 2 == 0 else ask.params


class Offering(OfferedDrafters):
    """Sequences are drafted for by one drafter after the other, and some by the default under another name."""

    @property
    def law(self) -> DraftLaw:
        return reduce(or_, (drafter.law for drafter in self._all))

    def asked_for(self, i: int, ask: Ask) -> SamplingParams:
        names = [None, *self.others]
        return replace(ask.params, drafter=names[i % len(names)])


def expecting(maker: DraftMaker, expected: Callable[[Sequence[int]], Sequence[int]]) -> DraftMaker:
    return lambda dtype: Expecting(maker(dtype), expected)


def offering(*makers: DraftMaker) -> DraftMaker:
    def make(dtype: torch.dtype) -> Drafter:
        default, *others = (maker(dtype) for maker in makers)
        return Offering(default, {"same": default} | {f"other-{i}": other for i, other in enumerate(others)})

    return make


@dataclass
class Changing:
    """In every step another drafter for each sequence, and now and then none."""

    nodes: int
    names: Sequence[str]
    draw: random.Random = field(default_factory=lambda: random.Random(5))

    def budget(self, load: Load) -> Budget:
        chosen = {seq: self.draw.choice(self.names) for seq in load.sequences}
        return Budget(self.nodes * (self.draw.random() < 0.9), drafters=chosen)

    def observe(self, report: StepReport) -> None:
        assert len(report.sequences) == len(report.drafters) == len(report.outcomes)


def choosing(*makers: DraftMaker) -> DraftMaker:
    def make(dtype: torch.dtype) -> Drafter:
        drafters = {f"choice-{i}": maker(dtype) for i, maker in enumerate(makers)}
        return OfferedDrafters(drafters["choice-0"], drafters, tuple(drafters))

    return make


def with_student(grower: Grower, seed: int = 3) -> DraftMaker:
    """A layer between the tiny target's words, with random weights."""

    def make(dtype: torch.dtype) -> Drafter:
        target = TinyCheckpoint(tiny_config())
        net = randomised(Student(_stack(target.config, 1)).double(), seed)
        own = {name: value.to(dtype) for name, value in net.state_dict().items()}
        student = SharedWords("student", net.config, own, target)
        return StudentDrafter(student, ModelRunner.load(student, dtype, CPU, 200, 4), grower)

    return make
