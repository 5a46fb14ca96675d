"""The command line as a user meets it: what it prints where, and what its exit code says."""

from __future__ import annotations

import errno
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors import SafetensorError
from typer.testing import CliRunner

import draftwood
from draftwood.assembly import SHIPPED
from draftwood.cli import app
from draftwood.cli.flags import EngineFlags
from draftwood.cli.screen import coloured, figures
from draftwood.engine.building import Builder
from draftwood.engine.llm import LLM
from draftwood.model import store
from draftwood.request import Event, FinishReason, SpeculationStats
from draftwood.verifiers import LAWS
from tiny import tiny_folder

KEYS = {
    "text",
    "token_ids",
    "num_tokens",
    "steps",
    "drafted",
    "accepted",
    "tokens_per_step",
    "seconds",
    "tokens_per_second",
    "finish_reason",
    "model",
    "drafter",
    "law",
    "lossless",
    "drift",
    "seed",
    "reproducible",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may see or touch the user's models."""
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))


def run(*arguments: str, input: str | bytes | None = None) -> Any:
    result = CliRunner().invoke(app, list(arguments), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def assert_refused(result: Any, *words: str) -> None:
    """One paragraph on stderr, exit code 1, nothing on stdout."""
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


# --- what comes out


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"draftwood {draftwood.__version__}\n")


@pytest.mark.parametrize(
    "command", [(), ("generate",), ("chat",), ("demo",), ("calibrate",), ("models",), ("parts",), ("export",)]
)
def test_help_is_there_for_every_command(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    assert "MISSING" not in result.stdout  # of what has no default


def test_help_lists_the_commands() -> None:
    text = run("--help").stdout
    assert all(command in text for command in ("generate", "chat", "demo", "models", "parts", "--install-completion"))


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_do_not_import_torch(argument: str) -> None:
    code = (
        f"import sys; sys.argv = ['draftwood', {argument!r}]\n"
        "from draftwood.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_serve_reads_weights_ahead_before_it_imports_torch() -> None:
    """Importing torch takes seconds, in which a disk can read."""
    code = (
        "import sys\n"
        "from draftwood.cli import serve\n"
        "from draftwood.cli.flags import EngineFlags\n"
        "def ahead(files):\n"
        "    assert 'torch' not in sys.modules\n"
        "    sys.exit(7)\n"
        "serve.reading_ahead = ahead\n"
        "serve.run_serve(EngineFlags(), serve.ServeFlags(port=0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr


def test_package_loads_its_names_lazily() -> None:
    assert set(draftwood.__all__) <= set(dir(draftwood))
    assert all(getattr(draftwood, name) is not None for name in draftwood.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        draftwood.nonsense  # noqa: B018


def test_every_step_is_explained_if_that_is_asked_for(folder: str) -> None:
    flags = ("-m", folder, "-n", "12", "-d", "ngram:shortest=1", "--controller", "fixed:nodes=2")
    text = run("generate", "Hello", *flags, "--json").stdout
    explained = run("generate", "Hello", *flags, "--json", "--explain")
    steps = [line for line in explained.stderr.splitlines() if line.startswith("step ")]
    answer = json.loads(explained.stdout)
    assert answer["token_ids"] == json.loads(text)["token_ids"]
    assert len(steps) == answer["steps"]
    assert all(" ms · always 2 nodes" in line for line in steps)
    assert (
        sum(int(line.split(" guesses kept")[0].split(" of ")[-2].split()[-1]) for line in steps) == answer["accepted"]
    )


def test_generate_prints_the_text_and_nothing_else(folder: str) -> None:
    result = run("generate", "Hello", "-m", folder, "-n", "12")
    assert result.exit_code == 0
    assert result.stdout.endswith("\n")
    assert "\x1b[" not in result.stdout
    assert result.stderr == ""


def test_json_is_one_line_with_every_key(folder: str) -> None:
    result = run("generate", "Hello", "--model", folder, "--max-tokens", "12", "--json", "--seed", "5")
    assert result.stdout.count("\n") == 1
    record = json.loads(result.stdout)
    assert record.keys() >= KEYS
    assert record["num_tokens"] == len(record["token_ids"]) == 12
    assert (record["seed"], record["model"], record["drafter"], record["law"]) == (
        5,
        folder,
        EngineFlags().drafter,
        "match",
    )
    assert EngineFlags(device="cpu").drafter == "suffix"
    assert EngineFlags(device="cuda").drafter == "ngram"
    assert record["finish_reason"] == "length"
    assert (record["lossless"], record["drift"]) == (True, 0.0)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model that is like the target, not the same."""
    return str(tiny_folder(tmp_path_factory.mktemp("models") / "draft", noise=0.2))


@pytest.mark.parametrize(
    ("flags", "law", "lossless"),
    [
        (("--tree", "sampled-chain"), "block", True),
        (("--tree", "sampled-chain", "--law", "walk"), "walk", True),
        (("--tree", "paths:paths=2,depth=2"), "layer-kseq", True),
        (("--law", "coupled"), "coupled", True),
        (("--tree", "sampled-chain", "--law", "typical:threshold=0.2"), "typical", False),
        (("--tree", "sampled-chain", "--law", "mixture:weight=0.5"), "mixture", False),
    ],
)
def test_json_says_by_which_law_and_what_it_did(
    folder: str, draft_folder: str, flags: tuple[str, ...], law: str, lossless: bool
) -> None:
    arguments = ("generate", "Hello", "-m", folder, "-d", f"model:{draft_folder}", "-n", "16", "-t", "1")
    seed = ("--seed", "3") if "--law" in flags else ()  # a seed alone asks for `match`, see below
    record = json.loads(run(*arguments, "--json", *flags, *seed).stdout)
    assert (record["law"], record["lossless"]) == (law, lossless)
    assert record["reproducible"] == (law == "coupled")
    if law == "mixture":
        assert record["drift"] > 0
    else:
        assert record["drift"] == (0.0 if lossless else None)


def test_json_knows_no_nan(folder: str, draft_folder: str) -> None:
    """What is not known is null, on one line of JSON that every reader takes."""
    flags = ("-d", f"model:{draft_folder}", "--tree", "sampled-chain", "--law", "lenient", "-t", "1", "-n", "9")
    text = run("generate", "Hello", "-m", folder, "--json", *flags).stdout
    assert '"drift": null' in text
    assert "NaN" not in text


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody is watching."""

    def watched() -> Console:
        return Console(stderr=True, force_terminal=True, highlight=False, width=400)

    for module in ("screen", "session"):
        monkeypatch.setattr(f"draftwood.cli.{module}.stderr", watched)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("law", "words"),
    [
        (
            "typical",
            ("NOT the model’s own words", "the law 'typical' moved their distribution", "not known how far"),
        ),
        (
            "mixture:weight=0.5",
            ("NOT the model’s own words", "the law 'mixture'", "in total variation, all steps added"),
        ),
        ("walk", ()),
    ],
)
def test_whoever_watches_is_told_when_the_words_are_not_the_models_own(
    folder: str, draft_folder: str, law: str, words: tuple[str, ...]
) -> None:
    flags = ("-d", f"model:{draft_folder}", "--tree", "sampled-chain", "-n", "12", "-t", "1", "--seed", "2")
    shown = run("generate", "Hello", "-m", folder, "--law", law, *flags).stderr
    assert "tokens/step" in shown
    assert all(word in shown for word in words)
    assert ("NOT the model" in shown) == bool(words)


def test_figures_say_what_a_lossy_law_did() -> None:
    known = SpeculationStats(law="mixture", lossless=False, drift=0.125)
    assert "own words: the law 'mixture' moved their distribution, by 0.125 in total variation" in figures(known)
    unknown = SpeculationStats(law="relaxed", lossless=False, drift=None)
    assert "the law 'relaxed' moved their distribution, not known how far" in figures(unknown)
    assert "words" not in figures(SpeculationStats(law="block"))


def test_a_drawn_seed_is_told_and_gives_the_same_answer_again(folder: str) -> None:
    arguments = ("generate", "Hello", "-m", folder, "-n", "8", "-t", "1", "--json")
    first = json.loads(run(*arguments).stdout)
    again = json.loads(run(*arguments, "--seed", str(first["seed"])).stdout)
    assert again["token_ids"] == first["token_ids"]


def test_a_seed_decides_the_answer_of_drawn_trees_unless_a_law_is_named(folder: str, draft_folder: str) -> None:
    drawn = ("-d", f"model:{draft_folder}", "--tree", "sampled-chain", "-t", "1", "-n", "12", "--seed", "2")
    plain = json.loads(run("generate", "Hello", "-m", folder, "--json", *drawn[4:]).stdout)
    record = json.loads(run("generate", "Hello", "-m", folder, "--json", *drawn).stdout)
    assert (record["law"], record["reproducible"], record["seed"]) == ("match", True, 2)
    assert record["token_ids"] == plain["token_ids"]
    told = run("generate", "Hello", "-m", folder, *drawn).stderr
    named = run("generate", "Hello", "-m", folder, *drawn, "--law", "block").stderr
    assert "seed" not in told
    assert "With the law 'block' and these settings this seed may give other tokens another time" in named


def test_every_drafter_gives_the_same_tokens(folder: str) -> None:
    def tokens(*drafter: str) -> list[int]:
        arguments = ("generate", "abababab", "-m", folder, "-n", "16", "--json", "--dtype", "float64")
        return json.loads(run(*arguments, *drafter).stdout)["token_ids"]

    plain = tokens("--drafter", "none")
    assert tokens("--drafter", "ngram:nodes=6,shortest=1") == plain
    assert tokens("--drafter", f"model:{folder}", "--tree", "beam:nodes=6,width=2,depth=3") == plain


@pytest.mark.parametrize("weights", ["float32", "int8", "w4a8"])
def test_weights_and_strictness_can_be_chosen(folder: str, weights: str) -> None:
    flags = ("--model", folder, "--json", "-n", "12", "--weights", weights, "--strict")
    plain, guessed = (run("generate", "abab", *flags, "-d", d) for d in ("none", "ngram:shortest=1"))
    assert plain.exit_code == guessed.exit_code == 0
    assert json.loads(plain.stdout)["token_ids"] == json.loads(guessed.stdout)["token_ids"]


def test_strict_in_float64_is_refused(folder: str) -> None:
    assert_refused(run("generate", "a", "--model", folder, "--strict", "--dtype", "float64"), "Strict", "float64")


def test_weights_with_another_dtype_are_refused(folder: str) -> None:
    result = run("generate", "a", "--model", folder, "--weights", "int8", "--dtype", "bfloat16")
    assert_refused(result, "int8", "bfloat16")


def test_missing_kernels_are_mentioned(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.ops.native.why_missing", lambda: "no compiler")
    result = run("generate", "a", "--model", folder, "-n", "2")
    assert result.exit_code == 0
    assert "no compiler" in result.stderr


def test_calibrate_prints_a_table_or_json(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.calibration.REPEATS", 1)
    table = run("calibrate", "--model", folder, "--threads", "1")
    assert table.exit_code == 0
    assert "Rows" in table.stdout
    assert "1.00×" in table.stdout
    record = json.loads(run("calibrate", "--model", folder, "--threads", "1", "--json").stdout)
    assert record["rows"][0] == 1
    assert record["weights"] == "stored"
    assert len(list(Path(os.environ["DRAFTWOOD_HOME"], "costs").iterdir())) == 1


def test_prompt_from_standard_input(folder: str) -> None:
    piped = json.loads(run("generate", "-", "-m", folder, "-n", "6", "--json", input="Hello").stdout)
    given = json.loads(run("generate", "Hello", "-m", folder, "-n", "6", "--json").stdout)
    assert piped["token_ids"] == given["token_ids"]


def test_raw_and_system_change_what_the_model_reads(folder: str) -> None:
    def prompt_tokens(*flags: str) -> int:
        return json.loads(run("generate", "Hello", "-m", folder, "-n", "1", "--json", *flags).stdout)["prompt_tokens"]

    assert prompt_tokens("--raw") == len("Hello")
    assert prompt_tokens("--system", "Be kind.") > prompt_tokens() > prompt_tokens("--raw")


def test_stop_string_ends_the_answer_and_is_not_part_of_it(folder: str) -> None:
    arguments = ("generate", "Hello", "-m", folder, "--raw", "-n", "12", "--json")
    text = json.loads(run(*arguments).stdout)["text"]
    stop = next(character for character in text[2:] if character != "�")
    stopped = json.loads(run(*arguments, "--stop", stop, "--stop", "never said").stdout)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(stop)]


def test_models_tells_what_is_missing() -> None:
    result = run("models")
    assert result.exit_code == 0
    assert all(word in result.stdout for word in ("smollm2", "no", "98 MB", "Apache-2.0"))


def test_models_fetch_prints_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "fetch", lambda alias, progress: tmp_path / alias)
    result = run("models", "--fetch", "smollm2")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'smollm2'}\n")


def test_parts_lists_all_of_them() -> None:
    result = run("parts")
    assert result.exit_code == 0
    words = ("ngram", "model:NAME", "beam", "hybrid", "widths=2x2x1", "paths=2, depth=4, trunk=0", "coupled")
    assert all(word in result.stdout for word in words)
    assert "nodes=4 (15 on a GPU)" in result.stdout


def test_parts_says_of_every_trained_drafter_what_it_is() -> None:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run("parts").stdout.splitlines()]
    said: dict[str, str] = {}
    for row in (row for row in rows if len(row) == 3):
        name = row[0] or list(said)[-1]  # a long text goes on below
        said[name] = f"{said.get(name, '')} {row[2]}"
    said = {name: text for name, text in said.items() if name in SHIPPED}
    assert set(said) == {"block", "eagle3", "hydra", "medusa", "student"}
    assert len(set(said.values())) == 5
    assert all("trained for smollm2" in text for text in said.values())


@pytest.mark.parametrize("command", [("parts",), ("models",), ("laws", "--list"), ("train", "--list")])
def test_tables_are_not_cut_off_at_80_columns(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    commands = importlib.import_module("draftwood.cli.app")  # the package has an `app` of its own
    monkeypatch.setattr(commands, "stdout", lambda: Console(highlight=False, width=80))
    lines = run(*command).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]


def test_parts_says_of_every_law_whether_it_is_lossless() -> None:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run("parts").stdout.splitlines()]
    laws = {row[0]: row for row in rows if len(row) == 5 and row[0] in LAWS}
    assert list(laws) == list(LAWS)
    assert {name for name, row in laws.items() if row[1] == "NO"} == {
        *("typical", "threshold", "relaxed", "lenient", "mixture")
    }
    assert laws["match"][1:4] == ["yes", "every tree", "-"]
    assert laws["block"][2] == "one path"
    assert laws["gbv"][2] == "independent paths: independent draws"
    assert laws["rrsw"][2] == "draws without replacement"
    assert laws["typical"][3] == "threshold=0.3, alpha=0.09"


def test_guesses_are_coloured_and_escape_sequences_defused() -> None:
    text = coloured([("plain \x1b[2J", False), ("guessed\n", True)])
    assert text.plain == "plain [2Jguessed\n"
    assert [(span.start, span.end, span.style) for span in text.spans if span.style] == [(9, 17, "green")]


# --- what is refused


def generate_with(folder: str, *arguments: str) -> Any:
    return run("generate", "Hello", "--model", folder, *arguments)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_empty_prompt(prompt: str) -> None:
    assert_refused(run("generate", prompt), "prompt is empty")


def test_empty_standard_input() -> None:
    assert_refused(run("generate", "-", input=""), "prompt is empty")


def test_standard_input_that_is_no_text() -> None:
    assert_refused(run("generate", "-", input=b"\xff\xfe"), "not UTF-8")


def test_prompt_beyond_the_context_window(folder: str) -> None:
    assert_refused(run("generate", "a" * 600, "-m", folder), "context", "512")


def test_prompt_beyond_the_cache(folder: str) -> None:
    assert_refused(run("generate", "a" * 200, "-m", folder, "--cache-tokens", "128"), "cache", "128")


def test_unknown_model() -> None:
    assert_refused(run("generate", "Hello", "--model", "nonsense"), "'nonsense'", "smollm2")


@pytest.mark.parametrize(
    ("flag", "choices"),
    [
        ("--drafter", ("none", "ngram", "model:NAME")),
        ("--law", ("auto", "match", "walk", "block", "mixture")),
        ("--tree", ("chain", "beam", "hybrid")),
        ("--dtype", ("float32", "bfloat16")),
        ("--weights", ("stored", "int8", "w4a8")),
    ],
)
def test_unknown_part_lists_the_choices(folder: str, flag: str, choices: tuple[str, ...]) -> None:
    assert_refused(generate_with(folder, flag, "nonsense"), "'nonsense'", *choices)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--temperature", "nan"), "temperature"),
        (("--temperature", "inf"), "temperature"),
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "0"), "top_p"),
        (("--top-k", "-1"), "top_k"),
        (("--min-p", "2"), "min_p"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--seed", str(1 << 64)), "seed"),
        (("--stop", ""), "stop"),
        (("--threads", "0"), "threads"),
        (("--cache-tokens", "-1"), "cache_tokens"),
        (("--device", "nowhere"), "nowhere"),
        (("--drafter", "ngram:nodes=many"), "nodes"),
        (("--drafter", "ngram:colour=red"), "colour"),
        (("--law", "typical:threshold=2"), "threshold"),
        (("--law", "typical:colour=red"), "colour"),
        (("--law", "block:threshold=0.5"), "it has: none"),
    ],
)
def test_parameters_out_of_range(folder: str, flags: tuple[str, ...], word: str) -> None:
    assert_refused(generate_with(folder, *flags), word)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--raw", "--system", "Be kind."), "--system"),
        (("--drafter", "ngram", "--tree", "beam"), "--tree"),
        (("--drafter", "ngram:branches=2", "--law", "block"), "block"),
        (("--drafter", "ngram", "--law", "gbv"), "chosen tokens"),
    ],
)
def test_contradictory_parameters(folder: str, flags: tuple[str, ...], word: str) -> None:
    assert_refused(generate_with(folder, *flags), word)


@pytest.mark.parametrize(
    "arguments",
    [("generate",), ("nonsense",), ("generate", "Hello", "--top-k", "many"), ("chat", "--nonsense")],
)
def test_usage_errors_have_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_unknown_model_to_fetch() -> None:
    assert_refused(run("models", "--fetch", "nonsense"), "nonsense", "smollm2")


def test_a_failing_engine_is_explained(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*_: object) -> Iterator[Event]:
        yield Event(0, 0, (), (), "", FinishReason.ERROR, SpeculationStats(), error="The engine failed: out of luck")

    monkeypatch.setattr(LLM, "stream", stream)
    assert_refused(generate_with(folder), "out of luck")


def test_too_little_memory_is_explained(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Builder, "build", build)
    assert_refused(generate_with(folder), "memory")


@pytest.mark.parametrize("drafter", SHIPPED)
def test_a_drafter_of_another_model_says_which(folder: str, drafter: str) -> None:
    result = run("generate", "a", "-m", folder, "--drafter", drafter)
    assert_refused(result, "was trained for smollm2 (hidden size 576)", f"the target is {folder} (hidden size 32)")
    assert "draftwood train" in result.stderr


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x.svg"), "the disk is full (x.svg)"),
        (OSError(errno.EROFS, "Read-only file system", "x.svg"), "read-only file system (x.svg)"),
        (SafetensorError('Error while serializing: I/O error: "No space left on device" (28)'), "the disk is full"),
    ],
)
def test_what_cannot_be_written_is_a_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("draftwood.cli.parts.models_table", fail)
    assert_refused(run("models"), reason, "Make room")


def test_other_failures_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("draftwood.cli.parts.models_table", fail)
    with pytest.raises(OSError, match="Input/output"):
        run("models")


def test_a_home_that_cannot_be_written_is_named(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr("draftwood.calibration.REPEATS", 1)
    result = run("calibrate", "--model", folder, "--threads", "1")
    assert result.exit_code == 0, "it was measured all the same"
    assert "could not be kept" in result.stderr
    assert "set DRAFTWOOD_HOME to a folder" in result.stderr
    assert "Errno" not in result.stderr


# --- Ctrl-C and pipes


def test_interrupted_fetch_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_download", download)
    result = run("models", "--fetch", "smollm2")
    assert result.exit_code == 130
    assert "Stopped." in result.stderr
    assert result.stdout == ""
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_interrupted_loading_is_no_traceback(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Builder, "build", build)
    result = generate_with(folder)
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Stopped." in result.stderr


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "draftwood", *arguments]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # Whoever runs the tests in the background has told their children to ignore Ctrl-C.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, text=True, env=environment, preexec_fn=listen, **pipes)  # type: ignore[call-overload]


@pytest.mark.slow
def test_ctrl_c_while_an_answer_comes(folder: str) -> None:
    """The real signal in a real process: text stays, one word of explanation, 130."""
    # In float64 an answer takes seconds: it must not be over before the signal arrives.
    process = start("generate", "Hello", "-m", folder, "--raw", "-n", "500", "--drafter", "none", "--dtype", "float64")
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped." in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_traceback(folder: str) -> None:
    process = start("generate", "Hello", "-m", folder, "--raw", "-n", "500", "--drafter", "none")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    deadline = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    errors = process.stderr.read()
    process.stderr.close()
    assert process.stdin is not None
    process.stdin.close()
    assert "Traceback" not in errors


# --- chat


def test_chat_answers_line_by_line_and_remembers(folder: str) -> None:
    result = run("chat", "-m", folder, "-n", "5", "--json", input="Hello\n\nAgain\n/exit\nnever read\n")
    assert result.exit_code == 0
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first.keys() >= KEYS
    assert second["prompt_tokens"] > first["prompt_tokens"] + 5


def test_chat_in_a_pipe_prints_plain_answers(folder: str) -> None:
    result = run("chat", "-m", folder, "-n", "5", input="Hello\nAgain\n")
    assert result.exit_code == 0
    assert result.stdout.endswith("\n")
    assert "\x1b[" not in result.stdout
    assert result.stderr == ""


def test_chat_commands(folder: str) -> None:
    lines = [
        "Hello",
        "/reset",
        "Hello",
        "/system Be kind.",
        "Hello",
        "/system",
        "Hello",
        "/help",
        "/nonsense",
    ]
    result = run("chat", "-m", folder, "-n", "3", "--json", input="\n".join(lines))
    sizes = [json.loads(line)["prompt_tokens"] for line in result.stdout.splitlines()]
    assert len(sizes) == 4
    assert sizes[0] == sizes[1] == sizes[3] < sizes[2]
    assert "There is no /nonsense" in result.stderr
    assert "/exit" in result.stderr


def test_ctrl_c_stops_one_answer_and_the_chat_goes_on(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LLM.stream
    calls = []

    def stream(self: LLM, *arguments: Any) -> Iterator[Event]:
        calls.append(arguments)
        events = whole(self, *arguments)
        yield next(events)
        if len(calls) == 1:
            raise KeyboardInterrupt
        yield from events

    monkeypatch.setattr(LLM, "stream", stream)
    result = run("chat", "-m", folder, "-n", "6", "--drafter", "none", "--json", input="Hello\nAgain\n")
    assert result.exit_code == 0
    stopped, answered = (json.loads(line) for line in result.stdout.splitlines())
    assert (stopped["finish_reason"], stopped["num_tokens"]) == ("cancelled", 1)
    assert (answered["finish_reason"], answered["num_tokens"]) == ("length", 6)
    assert "Stopped." in result.stderr


def test_chat_that_outgrows_the_window_says_so(folder: str) -> None:
    result = run("chat", "-m", folder, "-n", "5", input="a" * 600 + "\n")
    assert_refused(result, "context")


def test_chat_needs_a_template(tmp_path: Path) -> None:
    path = tiny_folder(tmp_path / "base")
    (path / "tokenizer_config.json").write_text("{}")
    assert_refused(run("chat", "-m", str(path), input="Hello\n"), "--raw")
    result = run("generate", "Hello", "-m", str(path), "-n", "2", "--json")
    assert json.loads(result.stdout)["prompt_tokens"] == len("Hello")


# --- demo


def demo(folder: str, *arguments: str) -> Any:
    return run("demo", "-m", folder, "-n", "6", "--dtype", "float64", "--cache-tokens", "4096", *arguments)


@pytest.fixture(scope="module")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Bytes are tokens here, so the demo's prompts need a longer window."""
    return str(tiny_folder(tmp_path_factory.mktemp("models") / "roomy", max_position_embeddings=4096))


def test_demo_compares_and_ends_with_a_summary(roomy_folder: str, tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    result = demo(roomy_folder, "--drafter", "ngram:shortest=1", "--svg", str(picture))
    assert result.exit_code == 0
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["identical"] is True
    assert summary["median_ratio"] > 0
    assert len(summary["prompts"]) == 4
    assert result.stdout.count("Identical tokens") == 4
    svg = picture.read_text()
    assert svg.startswith("<svg")
    assert "font-face" not in svg


def test_demo_measures_again_where_the_table_is_that_of_a_busy_machine(roomy_folder: str) -> None:
    home = Path(os.environ["DRAFTWOOD_HOME"])
    assert "Measuring what a step costs" in demo(roomy_folder).stderr
    (path,) = (home / "costs").iterdir()
    poisoned = json.dumps({"rows": [1, 4], "contexts": [64], "seconds": [[0.068, 0.428]], "per_sequence": 0.0})
    path.write_text(poisoned)
    assert "Measuring what a step costs" in demo(roomy_folder).stderr
    assert path.read_text() != poisoned
    path.write_text(poisoned.replace("0.428", "0.078"))
    assert "Measuring" not in demo(roomy_folder).stderr, "nothing is wrong with this one"


def test_demo_with_a_draft_model(roomy_folder: str) -> None:
    result = demo(roomy_folder, "--drafter", f"model:{roomy_folder}", "--tree", "chain:depth=2")
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["identical"]
    assert (
        summary["prompts"][0]["tokens_per_step"] >= 1
    )  # this drafter is no quicker than its target: little is asked of it


def test_demo_fails_when_answers_differ(roomy_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., Iterator[Event]] = LLM.stream
    calls = []

    def stream(self: LLM, prompt: Any, params: Any) -> Iterator[Event]:
        calls.append(prompt)
        yield from whole(self, prompt if len(calls) % 2 else "something else", params)

    monkeypatch.setattr(LLM, "stream", stream)
    result = demo(roomy_folder)
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[-1])["identical"] is False
    assert "DIFFER" in result.stdout
