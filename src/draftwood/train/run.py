"""A whole training run: the target's answers, the network, the steps, and what came of it by real decoding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftwood.assembly import load_runner
from draftwood.config import EngineConfig
from draftwood.engine.llm import LLM
from draftwood.engine.worker import ComputeThread
from draftwood.machine import give_back_memory
from draftwood.model.checkpoint import Checkpoint, open_checkpoint
from draftwood.nets.words import TargetWords
from draftwood.train.data import Corpus, PackedBatches, frequent_tokens, read_prompts, regenerate
from draftwood.train.loop import Summary, TrainConfig, Trainer
from draftwood.train.losses import parse_mix
from draftwood.train.recipes import Made, Target, build_method, num_parameters, seed_everything
from draftwood.train.teacher import Teacher

PAGE = 64
ANSWERING = 1 << 18  # tokens of a GPU's cache while the target answers; what comes next needs memory too
Say = Callable[[str], None]


@dataclass(frozen=True)
class TrainJob:
    """Everything a run depends on."""

    method: str
    model: str
    data: tuple[Path, ...]
    folder: Path  # corpus, checkpoints and curves
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the network
    training: TrainConfig = field(default_factory=lambda: TrainConfig(epochs=3))
    loss: str | None = None
    vocabulary: int = 8192  # tokens a draft may guess; 0: all
    rows: int = 16
    length: int = 512
    answers: int = 256  # tokens of an answer at most
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 0  # at most; 0: all
    device: str = "auto"


def corpus_of(job: TrainJob, checkpoint: Checkpoint, say: Say) -> Corpus:
    """The target's answers, generated once and kept beside the run."""
    facts = json.dumps(
        [
            job.model,
            [str(path.name) for path in job.data],
            job.answers,
            job.temperatures,
            job.prompts,
            job.training.seed,
        ]
    )
    path = job.folder / f"answers-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.safetensors"
    if path.is_file():
        return Corpus.load(path)
    prompts = read_prompts(job.data)[: job.prompts or None]
    say(f"The target answers {len(prompts)} prompts.")
    on_gpu = EngineConfig(device=job.device).torch_device().type == "cuda"
    config = EngineConfig(device=job.device, cache_tokens=ANSWERING if on_gpu else 0)
    with LLM(checkpoint, config=config) as llm:
        texts = []
        for text in regenerate(llm, prompts, job.answers, job.temperatures, job.training.seed):
            texts.append(text)
            if len(texts) % 4096 == 0:
                say(f"{len(texts)} answers, {sum(len(answer) for _, answer in texts)} tokens")
    corpus = Corpus.of(texts)
    corpus.save(path)
    give_back_memory()
    return corpus


def build(job: TrainJob, checkpoint: Checkpoint, corpus: Corpus) -> Made:
    """The network and its teacher."""
    config = EngineConfig(device=job.device, cache_tokens=job.rows * (job.length + 16 * PAGE), page_size=PAGE)
    runner = ComputeThread.shared().call(lambda: load_runner(checkpoint, config))
    words = TargetWords(checkpoint, runner.device, torch.float32)
    tokens = frequent_tokens(corpus, job.vocabulary, checkpoint.config.vocab_size) if job.vocabulary else None
    tokens = None if tokens is None else tokens.to(runner.device)
    seed_everything(job.training.seed)
    target = Target(checkpoint.config, words, tokens)
    mix = parse_mix(job.loss) if job.loss else None
    return build_method(job.method, target, lambda reads: Teacher(runner, reads), job.settings, mix)


def train(
    job: TrainJob, evaluate: Callable[[nn.Module], Callable[[int], float]] | None = None, say: Say = print
) -> tuple[Made, Summary]:
    """Run, or go on where an earlier run of the same folder stopped."""
    checkpoint = open_checkpoint(job.model)
    corpus = corpus_of(job, checkpoint, say)
    method = build(job, checkpoint, corpus)
    batches = PackedBatches(corpus, job.rows, job.length, job.training.seed)
    say(
        f"{num_parameters(method.module) / 1e6:.1f} M parameters, {len(corpus)} texts, {corpus.num_answered} tokens to "
        f"learn from, {len(batches)} batches an epoch"
    )
    score = None if evaluate is None else evaluate(method.module)
    trainer = Trainer(method, batches, job.training, job.folder / job.method, score, log=say)
    return method, trainer.run()


def names(paths: Sequence[Path]) -> str:
    """Of files, for people."""
    return ", ".join(path.name for path in paths)
