"""`draftwood train`: a drafter for a model, learnt from the model's own answers."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from draftwood.cli.flags import STOPPED, EngineFlags
from draftwood.cli.screen import say, stdout
from draftwood.errors import InvalidRequest

if TYPE_CHECKING:
    from draftwood.train.loop import Summary, TrainConfig
    from draftwood.train.run import Outcome, TrainJob

VOCABULARY = 8192  # tokens a draft may guess where no number is given
MUON_LR = 0.04  # this, a sixth of it for AdamW, and half of the steps decaying did best on SmolLM2
ADAMW_SHARE = 6
ADAMW_LR = 1e-3  # where it takes matrices too
WEIGHT_DECAY = 0.02
WARMUP, DECAY = 0.05, 0.5
EPOCHS = 3
SAVE_EVERY = 100  # steps; and at the latest after `TrainConfig.save_seconds`
GO_ON = "Run the same command again to go on."


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


@dataclass(frozen=True)
class TrainFlags:
    """What is learnt from, by which network, and how."""

    model: Annotated[
        str, _option("The target: an alias, a folder, a .gguf file or a hub id.", "Data", "--model", "-m")
    ] = EngineFlags.model
    data: Annotated[
        list[Path] | None,
        _option("Prompts: one a line, or JSON lines (.jsonl), or .gz of these; may be given several times.", "Data"),
    ] = None
    out: Annotated[Path | None, _option("Folder for answers, checkpoints and drafters.", "Data")] = None
    invent: Annotated[
        int, _option("So many prompts that the target writes itself, besides --data or instead.", "Data")
    ] = 0
    prompts: Annotated[int, _option("Prompts at most; 0: all.", "Data")] = 0
    answers: Annotated[int, _option("Longest answer, in tokens.", "Data")] = 256
    temperatures: Annotated[str, _option("At which the target answers, separated by commas.", "Data")] = "0,1"
    held_out: Annotated[int, _option("Texts to judge by, never learnt from; 0: a tenth, at most 200.", "Data")] = 0
    settings: Annotated[
        list[str] | None, _option("Of the method, such as layers=2; may be given several times.", "Network", "--set")
    ] = None
    loss: Annotated[str | None, _option("What is minimised, such as ce=0.1,tv=0.9.", "Network")] = None
    vocabulary: Annotated[
        int | None,
        _option(f"Tokens a draft may guess, the most frequent ones; 0: all; {VOCABULARY} if not given.", "Network"),
    ] = None
    export: Annotated[str, _option("Written as bfloat16, float16 or float32.", "Network")] = "bfloat16"
    epochs: Annotated[int | None, _option(f"How often every text is seen; {EPOCHS} if not given.", "Training")] = None
    steps: Annotated[int | None, _option("How many steps, instead of epochs.", "Training")] = None
    rows: Annotated[int, _option("Rows of a batch.", "Training")] = 32
    length: Annotated[int, _option("Tokens of a row.", "Training")] = 512
    accumulate: Annotated[int, _option("Batches of a step.", "Training")] = 1
    optimizer: Annotated[str, _option("muon (AdamW for what is no matrix) or adamw.", "Training")] = "muon"
    muon_lr: Annotated[float, _option("Learning rate of matrices under Muon.", "Training")] = MUON_LR
    lr: Annotated[
        float | None,
        _option(f"Of AdamW; a sixth of --muon-lr if not given, {ADAMW_LR} for --optimizer adamw.", "Training"),
    ] = None
    schedule: Annotated[str, _option("wsd (half of the steps decaying) or cosine.", "Training")] = "wsd"
    evaluate_every: Annotated[int, _option("Steps between looks at the held-out texts.", "Training")] = 100
    checkpoint_every: Annotated[
        int, _option("Steps between checkpoints; there is one at least every minute besides.", "Training")
    ] = SAVE_EVERY
    patience: Annotated[int | None, _option("End after so many looks without anything better.", "Training")] = None
    time_limit: Annotated[float | None, _option("Save and stop training after so many seconds.", "Training")] = None
    compile: Annotated[bool, _option("Let torch compile the network.", "Machine")] = False
    device: Annotated[str, _option("auto, cpu or cuda.", "Machine")] = "auto"
    seed: Annotated[int, _option("Of answers, network and order.", "Machine")] = 0

    def job(self, method: str) -> TrainJob:
        """Everything checked that can be without reading anything."""
        from draftwood.train.recipes import find_recipe
        from draftwood.train.run import TrainJob

        _, recipe = find_recipe(method)
        if not self.data and not self.invent:
            raise InvalidRequest(
                "Say what to learn from: --data FILE, with a prompt a line, or JSON lines (.jsonl); or --invent NUMBER."
            )
        if self.out is None:
            raise InvalidRequest("Say where answers, checkpoints and the drafter shall lie: --out FOLDER.")
        if recipe.whole_vocabulary and self.vocabulary:
            raise InvalidRequest("This drafter speaks the target's whole vocabulary; leave --vocabulary out.")
        usual = 0 if recipe.whole_vocabulary else VOCABULARY
        return TrainJob(
            method=method,
            model=self.model,
            data=tuple(self.data or ()),
            invent=self.invent,
            folder=self.out,
            settings=recipe.parse(self.settings or ()),
            training=self._training(),
            loss=self.loss,
            vocabulary=usual if self.vocabulary is None else self.vocabulary,
            rows=self.rows,
            length=self.length,
            answers=self.answers,
            temperatures=_numbers(self.temperatures),
            prompts=self.prompts,
            device=self.device,
            held_out=self.held_out,
            export=self.export,
        )

    def _training(self) -> TrainConfig:
        from draftwood.train.loop import TrainConfig
        from draftwood.train.optim import OptimConfig
        from draftwood.train.schedule import Schedule

        usual = self.muon_lr / ADAMW_SHARE if self.optimizer == "muon" else ADAMW_LR
        return TrainConfig(
            steps=self.steps,
            epochs=EPOCHS if self.steps is None and self.epochs is None else self.epochs,
            accumulate=self.accumulate,
            optimizer=OptimConfig(
                name=self.optimizer,  # type: ignore[arg-type]  # checked there
                lr=usual if self.lr is None else self.lr,
                muon_lr=self.muon_lr,
                weight_decay=WEIGHT_DECAY,
            ),
            schedule=Schedule(self.schedule, WARMUP, DECAY),  # type: ignore[arg-type]  # checked there
            save_every=self.checkpoint_every,
            evaluate_every=self.evaluate_every,
            patience=self.patience,
            seed=self.seed,
            time_limit=self.time_limit,
            compile=self.compile,
        )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"Temperatures are numbers separated by commas, not '{text}'.") from error


def run_train(method: str | None, flags: TrainFlags) -> None:
    """Train, or go on, and report."""
    from draftwood.cli.session import fetch_quietly
    from draftwood.train.run import run

    if method is None:
        raise InvalidRequest("Say what to train, such as `draftwood train eagle3`; `draftwood train --list` names all.")
    job = flags.job(method)
    fetch_quietly(flags.model)
    try:
        outcome = run(job, say, None if stdout().is_terminal else say)
    except KeyboardInterrupt:
        say(f"\nStopped; what is done is kept. {GO_ON}")
        raise typer.Exit(STOPPED) from None
    if outcome.info is None:
        _explain_stop(outcome.summary)
    else:
        _report(outcome, outcome.info, flags)


def _explain_stop(summary: Summary | None) -> None:
    """It stopped before its end: say where, and how to go on."""
    assert summary is not None
    say(f"Saved after step {summary.step} of {summary.total}. {GO_ON}")
    if summary.reason == "interrupted":
        raise typer.Exit(STOPPED)


def _report(outcome: Outcome, info: Mapping[str, Any], flags: TrainFlags) -> None:
    if outcome.summary is None:
        say(f"This run is finished: {info['steps']} steps. To train anew, choose another --out.")
    stdout().print(figures_table(info))
    model = [] if flags.model == EngineFlags.model else ["--model", flags.model]
    options = shlex.join([*model, "--drafter", str(outcome.drafter)])
    sys.stdout.write(f'draftwood generate "…" {options}\n')


def figures_table(info: Mapping[str, Any]) -> Table:
    """What a drafter is worth, depth by depth: on held-out text, and by decoding."""
    held, decoded = info["held_out"], info["decoding"]
    greedy, sampled = decoded["greedy"], decoded["sampled"]
    title = f"{info['recipe']}, {info['steps']} steps, tree {decoded['tree']}"
    columns = ("Depth", "Held out: agrees", "accepted if drawn", "Decoding, T=0: accepted", "T=1: accepted")
    table = Table(*columns, title=title, title_justify="left")
    depths = sum(name.startswith("agree_") for name in held)
    for depth in range(1, 1 + max(depths, len(greedy["accepted"]), len(sampled["accepted"]))):
        cells = [held.get(f"agree_{depth}"), held.get(f"accept_{depth}")]
        cells += [(side["accepted"][depth - 1 : depth] or [None])[0] for side in (greedy, sampled)]
        table.add_row(str(depth), *("" if cell is None else f"{cell:.1%}" for cell in cells))
    table.add_section()
    rates = (held["chain"], greedy["tokens_per_step"], sampled["tokens_per_step"])
    chain, *real = (f"{rate:.2f}" for rate in rates)
    table.add_row("Tokens a step", f"{chain} expected", "", *real)
    return table


def recipes_table() -> Table:
    """What can be trained, with its settings."""
    from draftwood.train.recipes import OTHER_NAMES, RECIPES

    table = Table("Name", "Settings (--set)", "Loss (--loss)", "What it is")
    for name, recipe in RECIPES.items():
        others = [other for other, own in OTHER_NAMES.items() if own == name]
        settings = ", ".join(f"{key}={str(value).lower()}" for key, value in recipe.defaults.items())
        loss = ",".join(f"{key}={value:g}" for key, value in recipe.loss.items())
        table.add_row(" or ".join([name, *others]), settings, loss, recipe.describe)
    return table
