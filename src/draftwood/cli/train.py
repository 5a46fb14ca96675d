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

VOCABULARY = 8192  # tokens a draft may guess where nobody says how many
MUON_LR = 0.02  # this, a sixth of it for AdamW, and half of the steps decaying did best on SmolLM2
ADAMW_SHARE = 6
ADAMW_LR = 1e-3  # where it takes matrices too
WEIGHT_DECAY = 0.02
WARMUP, DECAY = 0.05, 0.5
EPOCHS = 3
SAVE_EVERY = 100  # steps
GO_ON = "Run the same command again to go on."


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


@dataclass(frozen=True)
class TrainFlags:
    """What is learnt from, by which network, and how."""

    model: Annotated[str, _option("The target: an alias, a folder, a .gguf file or a hub id.", "Data", "--model", "-m")]
    model = EngineFlags.model
    data: Annotated[
        list[Path] | None,
        _option("Prompts: one a line, or JSON lines (.jsonl), or .gz of these; may be given several times.", "Data"),
    ] = None
    out: Annotated[Path | None, _option("Folder for answers, checkpoints and drafters.", "Data")] = None
    prompts: Annotated[int, _option("Prompts at most; 0: all.", "Data")] = 0
    answers: Annotated[int, _option("Longest answer, in tokens.", "Data")] = 256
    temperatures: Annotated[str, _option("At which the target answers, separated by commas.", "Data")] = "0,1"
    held_out: Annotated[int, _option("Texts to judge by, never learnt from; 0: a tenth, at most 200.", "Data")] = 0
    set: Annotated[
        list[str] | None, _option("Of the network, such as layers=2; may be given several times.", "Network")
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
    patience: Annotated[int | None, _option("End after so many looks without anything better.", "Training")] = None
    time_limit: Annotated[float | None, _option("Save and stop training after so many seconds.", "Training")] = None
    compile: Annotated[bool, _option("Let torch compile the network.", "Machine")] = False
    device: Annotated[str, _option("auto, cpu or cuda.", "Machine")] = "auto"
    seed: Annotated[int, _option("Of answers, network and order.", "Machine")] = 0
