"""What the commands can be told, as dataclasses; `command` turns their fields into options."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from draftwood.cli.screen import explain, say
from draftwood.errors import DraftwoodError, InvalidRequest
from draftwood.machine import why_unwritable
from draftwood.request import SamplingParams

if TYPE_CHECKING:
    from draftwood.config import EngineConfig

STOPPED = 130  # what a shell says of a program that Ctrl-C ended


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=True)


USUAL = "auto"


def _usual_drafter(device: str) -> str:
    """Of those without weights: on a GPU one that looks up there, so that no step waits for the host. Found out without
    torch, whose import takes seconds.
    """
    on_gpu = device.startswith("cuda") or (device == "auto" and Path("/dev/nvidia0").exists())
    return "ngram" if on_gpu else "suffix"


@dataclass(frozen=True)
class EngineFlags:
    """Which parts, and where they run."""

    model: Annotated[
        str,
        _option("An alias (see `draftwood models`), a folder, a .gguf file or a hub id.", "Parts", "--model", "-m"),
    ] = "smollm2"
    drafter: Annotated[
        str,
        _option(
            "Who guesses: none, ngram[:nodes=8,…], model:NAME, eagle3, a folder (see `draftwood parts`); auto: suffix "
            "on a CPU, ngram on a GPU.",
            "Parts",
            "--drafter",
            "-d",
        ),
    ] = USUAL
    law: Annotated[
        str,
        _option("Which guesses are kept: auto (lossless, by how guesses are made), match, block, …", "Parts"),
    ] = "auto"
    lora: Annotated[
        str | None, _option("Folder or hub id of a LoRA adapter (PEFT) to merge into the model.", "Parts")
    ] = None
    tree: Annotated[
        str | None,
        _option("Shape of a model's or a trained network's guesses, such as beam:nodes=16.", "Parts"),
    ] = None
    controller: Annotated[
        str,
        _option("How much is guessed in a step: auto, fixed[:nodes=3], off, goodput, gammatune, bandit.", "Parts"),
    ] = "auto"
    weights: Annotated[
        str,
        _option("What weights are stored as: stored (nothing is rounded), float32, bfloat16, int8, …", "Machine"),
    ] = "stored"
    impl: Annotated[
        str,
        _option(
            "What computes models: own, transformers (its modules, for any family it has), auto (own where known).",
            "Machine",
        ),
    ] = "auto"
    dtype: Annotated[str, _option("What is computed in: auto, float32, bfloat16, …", "Machine")] = "auto"
    strict: Annotated[
        bool, _option("The same bits whatever drafter, tree, batch and chunking; refused if it cannot be.", "Machine")
    ] = False
    allow_pickle: Annotated[
        bool,
        _option("Read a drafter's .pt or .bin file where it has nothing else; tensors only.", "Parts"),
    ] = False
    device: Annotated[str, _option("auto, cpu or cuda.", "Machine")] = "auto"
    threads: Annotated[int | None, _option("CPU threads; all cores if not given.", "Machine")] = None
    cache_tokens: Annotated[
        int, _option("Tokens the key-value cache holds; 0: 16384 on a CPU, what fits on a GPU.", "Machine")
    ] = 0
    cache_dtype: Annotated[
        str, _option("Keys and values as auto (what is computed in), int8 or fp8 (another model, said so).", "Machine")
    ] = "auto"
    tp: Annotated[
        int,
        _option("Processes that compute the model together, each on a GPU or on cores of its own.", "Machine"),
    ] = 1
    pp: Annotated[
        int, _option("Processes that compute it one after the other, each with some of the layers.", "Machine")
    ] = 1
    groups: Annotated[
        int, _option("Groups that requests decode in by turns, so that a remote drafter drafts meanwhile.", "Machine")
    ] = 1
    page_size: Annotated[int, _option("Tokens of a page: prompts share whole pages of the cache.", "Machine")] = 64
    cache_host_tokens: Annotated[
        int, _option("Tokens of evicted prefixes that host memory keeps, beside the cache.", "Machine")
    ] = 0
    offload: Annotated[
        str,
        _option("Layers that are not kept on the device: a share such as 0.8, or bytes such as 20GiB.", "Machine"),
    ] = "0"
    eager: Annotated[bool, _option("Launch every GPU kernel by itself: slow, for debugging.", "Machine")] = False

    def __post_init__(self) -> None:
        if self.drafter == USUAL:
            object.__setattr__(self, "drafter", _usual_drafter(self.device))

    def config(self) -> EngineConfig:
        """Sizes and places."""
        from draftwood.config import EngineConfig

        return EngineConfig(
            dtype=self.dtype,
            device=self.device,
            weights=self.weights,
            strict=self.strict,
            impl=self.impl,
            threads=self.threads,
            cache_tokens=self.cache_tokens,
            cache_dtype=self.cache_dtype,
            cache_host_tokens=self.cache_host_tokens,
            page_size=self.page_size,
            eager=self.eager,
            tp=self.tp,
            pp=self.pp,
            groups=self.groups,
            offload=_amount("--offload", self.offload),
            controller=self.controller,
        )


def _amount(name: str, text: str) -> float:
    """A number, or bytes with their unit."""
    units = {"": 1, **{f"{prefix}iB": 1 << 10 * (i + 1) for i, prefix in enumerate("KMGT")}}
    units |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) *([KMGT]i?B)?", text.strip())
    if match is None:
        raise InvalidRequest(f"{name} is '{text}': give a share such as 0.8, or bytes such as 20GiB.")
    return float(match[1]) * units[match[2] or ""]


@dataclass(frozen=True)
class SamplingFlags:
    """How an answer is drawn, and when it ends."""

    max_tokens: Annotated[int, _option("Longest answer.", "Sampling", "--max-tokens", "-n")] = 256
    temperature: Annotated[float, _option("0 takes the likeliest token.", "Sampling", "--temperature", "-t")] = 0.0
    top_p: Annotated[float, _option("Keep the likeliest tokens that make up this probability.", "Sampling")] = 1.0
    top_k: Annotated[int, _option("Keep this many tokens; 0: all.", "Sampling")] = 0
    min_p: Annotated[float, _option("Keep tokens at least this likely, relative to the best.", "Sampling")] = 0.0
    seed: Annotated[
        int | None,
        _option(
            "The same seed gives the same answer with --law auto, match or coupled (on a GPU: and --strict); drawn if "
            "not given.",
            "Sampling",
        ),
    ] = None
    stop: Annotated[list[str] | None, _option("End before this text; may be given several times.", "Sampling")] = None

    def params(self) -> SamplingParams:
        """Checked."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose dataclass parameters become one option a field, and whose errors become sentences."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}

    @functools.wraps(function)
    def run(**values: Any) -> None:
        with_groups = dict(values)
        for name, group in groups.items():
            with_groups[name] = group(**{field.name: with_groups.pop(field.name) for field in fields(group)})
        _guarded(function, with_groups)

    parameters = [option for p in own for option in (_options(groups[p.name]) if p.name in groups else [p])]
    run.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    needed = inspect.Parameter.empty
    given = [(f.name, needed if f.default is MISSING else f.default) for f in fields(group)]
    return [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=hints[n]) for n, d in given]


def _guarded(function: Callable[..., None], values: dict[str, Any]) -> None:
    try:
        function(**values)
    except DraftwoodError as error:
        explain(str(error))
        raise typer.Exit(1) from error
    except MemoryError as error:
        explain("There is not enough memory for this; try a smaller --cache-tokens or a smaller model.")
        raise typer.Exit(1) from error
    except Exception as error:
        reason = why_unwritable(error)
        if reason is None:
            raise
        explain(f"Nothing more can be written: {reason}. Make room, or choose a folder you can write to.")
        raise typer.Exit(1) from error
    except KeyboardInterrupt as stop:
        say("\nStopped.")
        raise typer.Exit(STOPPED) from stop
