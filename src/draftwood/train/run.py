"""A whole training run: the target's answers, the network, the steps, and what came of it by real decoding.

Everything lies in one folder: the answers, which all methods share, and for each method its checkpoints, its curves
and the drafter. Running a job again goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftwood.assembly import load_runner
from draftwood.config import DTYPES, EngineConfig
from draftwood.engine.llm import LLM
from draftwood.engine.worker import ComputeThread
from draftwood.errors import DraftwoodError, InvalidRequest, StorageError
from draftwood.machine import give_back_memory, why_unwritable
from draftwood.model.checkpoint import Checkpoint, open_checkpoint
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.export import PRECISIONS, export
from draftwood.nets.medusa import ResBlock
from draftwood.nets.parts import Mlp
from draftwood.train import state
from draftwood.train.data import (
    Corpus,
    PackedBatches,
    Texts,
    frequent_tokens,
    invent_prompts,
    read_prompts,
    regenerate,
)
from draftwood.train.evaluate import MAX_PROMPTS, MAX_TOKENS, decode_figures, held_out_batches, held_out_figures
from draftwood.train.loop import CHECKPOINTS, FREE, Summary, TrainConfig, Trainer
from draftwood.train.losses import parse_mix
from draftwood.train.recipes import Made, Target, build_method, find_recipe, num_parameters
from draftwood.train.teacher import Teacher

PAGE = 64
ANSWERING = 1 << 18  # tokens of a GPU's cache while the target answers; what comes next needs memory too
HELD_OUT = 200  # texts at most, where no number is given
SHARE_HELD_OUT = 10  # one text of so many
DRAFTER, JOB = "drafter", "job.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainJob:
    """Everything a run depends on."""

    method: str
    model: str
    data: tuple[Path, ...]
    folder: Path  # answers, checkpoints, curves and drafters
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the network
    training: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=3))
    loss: str | None = None
    vocabulary: int = 8192  # tokens a draft may guess; 0: all
    rows: int = 16
    length: int = 512
    answers: int = 256  # tokens of an answer at most
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 0  # at most; 0: all
    invent: int = 0  # so many besides, which the target writes itself
    device: str = "auto"
    held_out: int = 0  # texts that are not learnt from; 0: a tenth, at most 200
    export: str = "bfloat16"

    def __post_init__(self) -> None:
        _, recipe = find_recipe(self.method)
        recipe.complete(self.settings)
        if self.loss is not None:
            parse_mix(self.loss)
        for name in ("rows", "length", "answers"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("vocabulary", "prompts", "invent", "held_out"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must not be negative; leave it out for what is usual.")
        if not self.temperatures or min(self.temperatures) < 0:
            raise InvalidRequest("The target needs a temperature to answer at, 0 or above, such as 0,1.")
        if DTYPES.get(self.export) not in PRECISIONS:
            raise InvalidRequest(f"A drafter is written as bfloat16, float16 or float32, not as {self.export}.")

    @property
    def place(self) -> Path:
        """Where checkpoints, curves and the drafter of its method lie."""
        return self.folder / find_recipe(self.method)[0]

    @property
    def mix(self) -> dict[str, float]:
        """What is minimised."""
        return dict(parse_mix(self.loss).weights if self.loss else find_recipe(self.method)[1].loss)


@dataclass(frozen=True)
class Outcome:
    """How a run stands: with figures it is finished and its drafter written; without, it waits to go on."""

    drafter: Path
    info: Mapping[str, Any] | None  # as in the drafter's config.json
    summary: Summary | None = None  # None: nothing was left to do


def run(job: TrainJob, say: Say = print, log: Say | None = None) -> Outcome:
    """Answer, train, evaluate and export, or whatever of it is still to be done.

    The trainer's own lines go to `log`; without one it draws a bar on the terminal. Where nothing can be written,
    because the disk is full or the folder not ours, it raises a StorageError that says what is kept.
    """
    try:
        return _run(job, say, log)
    except DraftwoodError:
        raise
    except Exception as error:
        reason = why_unwritable(error)
        if reason is None:
            raise
        raise StorageError(
            f"The run stopped because {job.folder} cannot be written: {reason}. {_kept(job)} Make room, or make the "
            "folder writable, and run the same command again to go on."
        ) from error


def _kept(job: TrainJob) -> str:
    """What the next run will find."""
    saved = state.checkpoints(job.place / CHECKPOINTS)
    if saved:
        return f"Training up to step {int(saved[-1].name.removeprefix(state.PREFIX))} is kept."
    if [*job.folder.glob("answers-*.safetensors"), *job.folder.glob("answers-*.waves/*.safetensors")]:
        return "The answers so far are kept; training has no checkpoint yet."
    return "Nothing had been kept yet."


def _run(job: TrainJob, say: Say, log: Say | None) -> Outcome:
    prompts = _prompts(job)
    facts = _facts(job, prompts)
    _check_same(job, facts)
    finished = _exported(job)
    if finished is not None:
        return Outcome(job.place / DRAFTER, finished)
    checkpoint = open_checkpoint(job.model, "own")
    job.place.mkdir(parents=True, exist_ok=True)
    state.write_text(job.place / JOB, json.dumps(facts, indent=1) + "\n")
    corpus = corpus_of(job, checkpoint, say, prompts)
    learnt, held = _split(job, corpus)
    net, summary, held_figures = _train(job, checkpoint, learnt, held, say, log)
    if summary.reason not in ("finished", "patience"):
        return Outcome(job.place / DRAFTER, None, summary)
    _let_go()
    say("Decoding with the new drafter …")
    asked = [held.text(i)[: int(held.prompt_lengths[i])].tolist() for i in range(min(len(held), MAX_PROMPTS))]
    decoded = decode_figures(
        net, checkpoint, asked, max_tokens=min(job.answers, MAX_TOKENS), device=job.device, seed=job.training.seed
    )
    info = _info(job, corpus, held, summary) | {"held_out": held_figures, "decoding": decoded}
    export(net, job.place / DRAFTER, target_name(job.model), info, dtype=DTYPES[job.export])
    return Outcome(job.place / DRAFTER, _exported(job), summary)


def _prompts(job: TrainJob) -> list[str]:
    """All that are asked, none twice, in an order that mixes files and sources; the held-out ones are the last."""
    given = read_prompts(job.data) if job.data or not job.invent else []
    prompts = list(dict.fromkeys([*given, *_invented(job)]))
    random.Random(job.training.seed).shuffle(prompts)
    return prompts[: job.prompts or None]


def _invented(job: TrainJob) -> list[str]:
    """What the target would be asked by its own account; written once, and kept beside the run."""
    if not job.invent:
        return []
    facts = [job.model, job.invent, job.training.seed]
    path = job.folder / f"prompts-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}.json"
    if not path.is_file():
        with LLM(open_checkpoint(job.model, "own"), config=_answering(job)) as llm:
            found = [text for wave in invent_prompts(llm, job.invent, seed=job.training.seed) for text in wave]
        _let_go()
        path.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(path, json.dumps(found, indent=0))
    return json.loads(path.read_text())


def _answering(job: TrainJob) -> EngineConfig:
    on_gpu = EngineConfig(device=job.device).torch_device().type == "cuda"
    return EngineConfig(device=job.device, cache_tokens=ANSWERING if on_gpu else 0)


def _answers_key(job: TrainJob, prompts: list[str]) -> str:
    facts = [job.model, job.answers, job.temperatures, job.training.seed, prompts]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _facts(job: TrainJob, prompts: list[str]) -> dict[str, Any]:
    """What must not change between the pieces of a run."""
    name, recipe = find_recipe(job.method)
    facts = {key: value for key, value in asdict(job.training).items() if key not in FREE} | {
        "recipe": name,
        "model": job.model,
        "settings": recipe.complete(job.settings),
        "loss": job.mix,
        "vocabulary": job.vocabulary,
        "rows": job.rows,
        "length": job.length,
        "held_out": job.held_out,
        "prompts and answers": _answers_key(job, prompts),
    }
    return json.loads(json.dumps(facts))  # as they are read back


def _check_same(job: TrainJob, facts: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that was begun otherwise; what has not begun may still change."""
    path = job.place / JOB
    begun = state.checkpoints(job.place / CHECKPOINTS) or (job.place / DRAFTER).exists()
    before = json.loads(path.read_text()) if begun and path.is_file() else facts
    changed = [key for key, value in facts.items() if before.get(key) != value]
    if changed:
        raise InvalidRequest(
            f"The run in {job.place} was begun with other settings: {', '.join(changed)}. "
            "Go on with those it has, or train into another folder (--out)."
        )


def _exported(job: TrainJob) -> dict[str, Any] | None:
    """What the drafter says of itself, if it is written already."""
    path = job.place / DRAFTER / "config.json"
    return json.loads(path.read_text())["draftwood"]["info"] if path.is_file() else None


def corpus_of(job: TrainJob, checkpoint: Checkpoint, say: Say, prompts: list[str] | None = None) -> Corpus:
    """The target's answers, generated once and kept beside the run; an interruption costs a wave at most."""
    prompts = _prompts(job) if prompts is None else prompts
    path = job.folder / f"answers-{_answers_key(job, prompts)}.safetensors"
    if not path.is_file():
        waves = path.with_suffix(".waves")  # files named by how many prompts are done with them
        _answer(job, checkpoint, prompts, waves, say)
        _let_go()
        texts = [text for file in sorted(waves.glob("*.safetensors")) for text in _texts(Corpus.load(file))]
        random.Random(job.training.seed).shuffle(texts)  # waves are sorted by temperature, and the last are held out
        _save_whole(Corpus.of(texts), path)
        shutil.rmtree(waves)
    corpus = Corpus.load(path)
    if not len(corpus):
        raise InvalidRequest(
            f"The target could answer none of the {len(prompts)} prompts: they do not fit its context window of "
            f"{checkpoint.config.max_positions} tokens, or its cache. Give shorter ones."
        )
    return corpus


def _answer(job: TrainJob, checkpoint: Checkpoint, prompts: list[str], waves: Path, say: Say) -> None:
    files = sorted(waves.glob("*.safetensors"))
    first = int(files[-1].stem) if files else 0
    if first >= len(prompts):
        return
    say(f"The target answers {len(prompts)} prompts{f', {first} of which it has before' if first else ''}.")
    tokens = 0
    with LLM(checkpoint, config=_answering(job)) as llm:
        for done, texts in regenerate(llm, prompts, job.answers, job.temperatures, job.training.seed, first):
            _save_whole(Corpus.of(texts), waves / f"{done:09d}.safetensors")
            tokens += sum(len(answer) for _, answer in texts)
            say(f"{done} of {len(prompts)} prompts answered, {tokens} tokens")


def _let_go() -> None:
    """What loads next plans with the memory that is free."""
    give_back_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _save_whole(corpus: Corpus, path: Path) -> None:
    """Whole or not at all."""
    draft = path.with_suffix(".partial")
    try:
        corpus.save(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _texts(corpus: Corpus) -> Texts:
    lengths = corpus.prompt_lengths.tolist()
    whole = [corpus.text(i).tolist() for i in range(len(corpus))]
    return [(tuple(text[:length]), tuple(text[length:])) for text, length in zip(whole, lengths, strict=True)]


def _split(job: TrainJob, corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Texts to learn from, and texts to judge by."""
    held_out = job.held_out or min(HELD_OUT, max(1, len(corpus) // SHARE_HELD_OUT))
    if held_out >= len(corpus):
        raise InvalidRequest(
            f"With {held_out} of {len(corpus)} texts held out there is none left to learn from: "
            "give more prompts, or hold out fewer."
        )
    return corpus.split(held_out)


def build(job: TrainJob, checkpoint: Checkpoint, corpus: Corpus, held: Corpus | None = None) -> Made:
    """The network and its teacher."""
    room = max(_cache_tokens(texts, job.rows, job.length) for texts in (corpus, held) if texts is not None)
    config = EngineConfig(device=job.device, cache_tokens=room, page_size=PAGE)
    runner = ComputeThread.shared().call(lambda: load_runner(checkpoint, config))
    words = TargetEmbeddings(checkpoint, runner.device, torch.float32)
    _, recipe = find_recipe(job.method)
    vocabulary, tokens = checkpoint.config.vocab_size, None
    if 0 < job.vocabulary < vocabulary and not recipe.whole_vocabulary:
        tokens = frequent_tokens(corpus, job.vocabulary, vocabulary).to(runner.device)
    torch.manual_seed(job.training.seed)
    target = Target(
        checkpoint.config, words, tokens, lambda name: checkpoint.tensor(name) if checkpoint.has(name) else None
    )
    mix = parse_mix(job.loss) if job.loss else None
    return build_method(job.method, target, lambda reads: Teacher(runner, reads), job.settings, mix)


def _cache_tokens(corpus: Corpus, rows: int, length: int) -> int:
    """Room for any batch: each text begins a page of its own, so one of the shortest texts needs the most."""
    lengths = corpus.ends.diff(prepend=corpus.ends.new_zeros(1)).clamp(max=length).sort().values
    texts = int((lengths.cumsum(0) <= rows * length).sum()) + 1
    return rows * length + texts * PAGE


def _train(
    job: TrainJob, checkpoint: Checkpoint, learnt: Corpus, held: Corpus, say: Say, log: Say | None
) -> tuple[nn.Module, Summary, dict[str, float]]:
    """The best network of the run, how the run ended, and the network's figures on held-out text if it did."""
    batches = PackedBatches(learnt, job.rows, job.length, job.training.seed)
    judged = held_out_batches(held, job.rows, job.length)
    method = build(job, checkpoint, learnt, held)
    if job.training.compile:
        _compile(method.module)
    say(
        f"{num_parameters(method.module) / 1e6:.1f} M parameters, {len(learnt)} texts, {learnt.num_answered} tokens to "
        f"learn from, {len(batches)} batches an epoch; {len(held)} texts held out"
    )

    def score(step: int) -> float:
        return held_out_figures(method, judged)["chain"]

    summary = Trainer(method, batches, job.training, job.place, score, log=log).run()
    if summary.reason not in ("finished", "patience"):
        return method.module, summary, {}
    if summary.best is not None:
        state.load_best(job.place, method.module)
    return method.module, summary, held_out_figures(method, judged)


def _compile(net: nn.Module) -> None:
    """The parts between attentions, in place; what attends has a memory and is left as it is."""
    for part in net.modules():
        if isinstance(part, Mlp | ResBlock):
            part.compile()


def _info(job: TrainJob, corpus: Corpus, held: Corpus, summary: Summary) -> dict[str, Any]:
    """How a drafter came to be, for its config.json."""
    name, recipe = find_recipe(job.method)
    return {
        "recipe": name,
        "settings": recipe.complete(job.settings),
        "loss": job.mix,
        "data": {
            "fingerprint": corpus.fingerprint,
            "texts": len(corpus),
            "held_out": len(held),
            "temperatures": list(job.temperatures),
        },
        "steps": summary.step,
        "best_step": summary.best_step,
        "tokens": summary.tokens,
        "seed": job.training.seed,
    }


def target_name(model: str) -> str:
    """A name that means something on other machines too."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model
