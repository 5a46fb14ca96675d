"""The commands."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import draftwood
from draftwood.cli import datastore, drafter
from draftwood.cli.export import ExportFlags, run_export
from draftwood.cli.flags import EngineFlags, SamplingFlags, command
from draftwood.cli.screen import Transcript, say, stdout
from draftwood.cli.serve import ServeFlags
from draftwood.cli.simulate import SimulateFlags
from draftwood.cli.train import TrainFlags
from draftwood.errors import InvalidRequest

app = typer.Typer(
    name="draftwood",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with [bold]draftwood demo[/], or [bold]draftwood chat[/]. "
    "What a drafter guessed right is printed in [green]green[/].",
)
app.add_typer(drafter.app, name="drafter", rich_help_panel="Answers")

app.add_typer(datastore.app, name="datastore", rich_help_panel="Answers")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON line for each answer and nothing else.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="Tell the model who it is.")]


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # no text is worth a crash
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"draftwood {draftwood.__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lossless speculative decoding: a drafter guesses, the model checks, the text stays the model's own."""


@app.command(rich_help_panel="Answers")
@command
def generate(
    engine: EngineFlags,
    sampling: SamplingFlags,
    prompt: Annotated[
        str | None, typer.Argument(help='The prompt, or "-" to read it from standard input.', show_default=False)
    ] = None,
    encoder_input: Annotated[
        str | None,
        typer.Option(help='What the encoder of an encoder-decoder model reads, or "-"; then a prompt may be left out.'),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the prompt as plain text, without the model's chat template."),
    ] = False,
    system: System = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say for every step what was guessed, why so much, and what it took.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt.

    [dim]Examples:[/]

    draftwood generate "Why is the sky blue?"

    draftwood generate --raw "Once upon a time" -n 50 -t 0.8 --seed 1

    cat notes.txt | draftwood generate - --drafter ngram:nodes=8 --json

    draftwood generate --model path/to/marian --encoder-input "Why is the sky blue?"
    """
    from draftwood.cli.session import conversation, open_llm, print_answer, report, step_told
    from draftwood.engine.sources import with_source

    params = sampling.params()
    if prompt is None and encoder_input is None:
        raise typer.BadParameter("give it, or --encoder-input", param_hint="PROMPT")
    source = None if encoder_input is None else _read_prompt(encoder_input, raw=True)
    text = None if prompt is None and source is not None else _read_prompt(prompt or "", raw)
    if raw and system is not None:
        raise InvalidRequest("--raw continues the bare prompt, so --system has no place in it; leave one of them out.")
    with open_llm(engine) as llm:
        plain = raw or source is not None or (system is None and not llm.tokenizer.has_chat_template)
        transcript = Transcript()
        if explain:
            params = replace(params, trace=True)
        asked = text if plain or text is None else conversation(text, system)
        listen = step_told if explain else None
        print_answer(llm, with_source(asked, source), params, transcript, quiet=as_json or explain, listen=listen)
        report(transcript, engine, params, as_json=as_json)


def _read_prompt(prompt: str, raw: bool) -> str:
    text = _read_stdin() if prompt == "-" else prompt
    if not (text if raw else text.strip()):
        raise InvalidRequest("The prompt is empty: say something for the model to answer.")
    return text


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"Standard input is not UTF-8 text (byte {error.start}); convert it first, e.g. with iconv."
        ) from error


@app.command(rich_help_panel="Answers")
@command
def chat(
    engine: EngineFlags,
    sampling: SamplingFlags,
    system: System = None,
    as_json: Json = False,
    adapt: Annotated[
        bool,
        typer.Option("--adapt", help="Let a trained drafter learn from the answers; /save FOLDER keeps it."),
    ] = False,
) -> None:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D or /exit leaves, /help tells the rest.

    [dim]Examples:[/]

    draftwood chat

    draftwood chat --system "You answer in one sentence." -t 0.7

    draftwood chat --drafter eagle3 --adapt

    printf 'Hello\\nAnd again?\\n' | draftwood chat --json
    """
    from draftwood.cli.chat import Chat
    from draftwood.cli.session import check_adaptable, open_llm, start_adapting

    sampling.params()  # refuse before anything is loaded
    if adapt:
        check_adaptable(engine)
    with open_llm(engine) as llm:
        adapter = start_adapting(llm) if adapt else None
        Chat(llm, engine, sampling, system, as_json=as_json, adapter=adapter).run()


@app.command(rich_help_panel="Answers")
@command
def demo(
    engine: EngineFlags,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Longest answer.")] = 96,
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw the result into this file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with a JSON summary on a terminal, too; elsewhere it always does.")
    ] = False,
) -> None:
    """Four prompts, each answered by plain and by speculative decoding, side by side.

    Every side runs alone, so that the times can be compared; ratios are withheld if the machine was not steady enough.
    Outside a terminal the last line is a JSON summary. The exit code is 1 if any answer differs.
    """
    from draftwood.cli.demo import run_demo

    if not run_demo(engine, SamplingFlags(max_tokens=max_tokens, seed=0).params(), svg, as_json=as_json):
        raise typer.Exit(1)


@app.command(rich_help_panel="Answers")
@command
def serve(
    flags: ServeFlags,
    engine: EngineFlags,
    served: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = None,
) -> None:
    """Answer OpenAI's clients over HTTP.

    [dim]Examples:[/]

    draftwood serve smollm2

    draftwood serve path/to/model --drafter eagle3 --offer ngram:nodes=8 --host 0.0.0.0 --api-key SECRET
    """
    from draftwood.cli.serve import run_serve

    run_serve(engine if served is None else replace(engine, model=served), flags)


@app.command(rich_help_panel="Answers")
@command
def train(
    flags: TrainFlags,
    method: Annotated[str | None, typer.Argument(help="What to train; see --list.", show_default=False)] = None,
    list_them: Annotated[bool, typer.Option("--list", help="Name every method, with its settings.")] = False,
) -> None:
    """Train a drafter for a model, on the model's own answers. The same command goes on where it was stopped.

    [dim]Examples:[/]

    draftwood train eagle3 --data prompts.txt --out runs

    draftwood train distill --model big.gguf --data a.jsonl --data b.jsonl.gz --out runs --set layers=6 --epochs 5
    """
    from draftwood.cli.train import recipes_table, run_train

    if list_them:
        stdout().print(recipes_table())
    else:
        run_train(method, flags)


@app.command(rich_help_panel="Answers")
@command
def export(
    drafter: Annotated[str, typer.Argument(help="A drafter that ships, a folder or a hub id.", show_default=False)],
    flags: ExportFlags,
) -> None:
    """Write a trained drafter as another engine loads it, with the rows of its head, tables and mask tokens.

    [dim]Example:[/]

    draftwood export eagle3 --for vllm --out eagle3-vllm --target HuggingFaceTB/SmolLM2-135M-Instruct
    """
    run_export(drafter, flags)


@app.command(rich_help_panel="What there is")
@command
def calibrate(engine: EngineFlags, as_json: Json = False) -> None:
    """Measure what a step costs on this machine by its number of rows; drafts are sized by it from then on.

    Takes a few seconds for each model, weight format and number of threads. The table is kept until one of them, the
    machine or the version changes; one that was taken on a busy machine is not used and is measured again.
    """
    from draftwood.cli.parts import costs_table
    from draftwood.cli.screen import write_json
    from draftwood.cli.session import open_llm

    with open_llm(engine) as llm:
        costs = llm.calibrate(say)
    if as_json:
        write_json(costs.record() | {"model": engine.model, "weights": engine.weights})
    else:
        stdout().print(costs_table(costs))


@app.command("search-skip", rich_help_panel="What there is")
@command
def search_skip(
    engine: EngineFlags,
    searched: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = None,
    policy: Annotated[
        str, typer.Option(help="auto (knapsack, then search), cosine (CLaSp), knapsack (KnapSpec), search (at random).")
    ] = "auto",
    prompts: Annotated[
        Path | None, typer.Option(help="Texts to answer: one a line, or JSON lines with turns, prompt or text.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 64,
    tries: Annotated[int, typer.Option(help="Sets that are tried at random.")] = 60,
    as_json: Json = False,
) -> None:
    """Find layers that drafts of a model can leave out, by expected tokens a second; kept for --drafter layer-skip.

    [dim]Example:[/]

    draftwood search-skip path/to/model --prompts questions.jsonl
    """
    from draftwood.cli.search_skip import run_search

    flags = engine if searched is None else replace(engine, model=searched)
    run_search(flags, policy, prompts, tokens, tries, as_json=as_json)


@app.command(rich_help_panel="What there is")
@command
def laws(
    engine: EngineFlags,
    list_them: Annotated[
        bool, typer.Option("--list", help="Name every law, what it is exact for and whether it is lossless.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Texts to answer: one a line, or JSON lines with turns, prompt or text.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0.2,0.6,1.0",
    contexts: Annotated[int, typer.Option(help="Places in the answers to draw trees at, for each temperature.")] = 32,
    paths: Annotated[int, typer.Option(help="Most paths of a tree.")] = 4,
    depth: Annotated[int, typer.Option(help="Tokens of a path.")] = 5,
    seed: Annotated[int, typer.Option(help="Of answers and trees.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for laws.html and laws.json.")] = Path("laws"),
    save: Annotated[Path | None, typer.Option(help="Also keep the recorded rows in this folder (large).")] = None,
    rows: Annotated[Path | None, typer.Option(help="Replay rows recorded before; no model is loaded.")] = None,
) -> None:
    """Compare all acceptance laws on a real pair of models: expected tokens a step, without sampling noise.

    [dim]Example:[/]

    draftwood laws --model big.gguf --drafter model:small.gguf --weights w8a8 --prompts questions.jsonl
    """
    from draftwood.cli.parts import laws_table
    from draftwood.lab.experiment import Setting

    if list_them:
        stdout().print(laws_table())
        return
    from draftwood.cli.laws import run_laws

    try:
        degrees = tuple(float(t) for t in temperatures.split(","))
    except ValueError as error:
        raise InvalidRequest(f"Temperatures are numbers separated by commas, not '{temperatures}'.") from error
    run_laws(engine, prompts, Setting(degrees, paths, depth, contexts, seed=seed), out, save, rows)


@app.command(rich_help_panel="What there is")
@command
def simulate(
    file: Annotated[Path, typer.Argument(help="A recording, or a described fleet; see docs/controller.md.")],
    engine: EngineFlags,
    flags: SimulateFlags,
    record: Annotated[
        bool, typer.Option("--record", help="Write FILE instead: what steps cost here, and what drafts gain.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Texts to record: one a line, or JSON lines with turns, prompt or text.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay recorded costs and acceptance through the real scheduler and controller: for machines that are not here.

    [dim]Examples:[/]

    draftwood simulate smollm2.json --record --drafter eagle3

    draftwood simulate fleet.json --controllers auto,off,fixed:nodes=3 --at 1,32,256 --tpot-ms 40
    """
    from draftwood.cli.simulate import run_record, run_simulate

    if record:
        run_record(engine, file, prompts)
    else:
        run_simulate(file, flags, as_json=as_json)


@app.command(rich_help_panel="What there is")
@command
def models(
    model: Annotated[
        str | None, typer.Argument(help="A folder, a .gguf file, a hub id or an alias: say what it is.")
    ] = None,
    impl: Annotated[
        str, typer.Option(help="What would compute it: own, transformers, auto (own where it knows the family).")
    ] = "auto",
    fetch: Annotated[
        str | None,
        typer.Option("--fetch", metavar="NAME", help="Download a model, so that later runs need no network."),
    ] = None,
) -> None:
    """Models that can be had by a short name, or what a model is: its family, what runs it, what memory it takes."""
    from draftwood.cli.parts import models_table
    from draftwood.model import store

    if model is not None:
        from draftwood.cli.about import about_table
        from draftwood.model.lora_folder import described, is_adapter

        if is_adapter(model):
            sys.stdout.write(f"{described(model)}\n")
            return
        stdout().print(about_table(model, impl))
        return
    if fetch is None:
        stdout().print(models_table())
        say(f"They lie in {store.models_dir()}. A folder, .gguf file or hub id works as well: --model PATH.")
        return
    path = store.fetch(fetch, say)
    sys.stdout.write(f"{path}\n")


@app.command(rich_help_panel="What there is")
@command
def parts() -> None:
    """Drafters, trees and acceptance laws, with their settings."""
    from draftwood.cli.parts import parts_tables

    for table in parts_tables():
        stdout().print(table)
    say("Settings go behind a colon: --drafter ngram:nodes=8,branches=2 or --tree beam:nodes=16,depth=4")
