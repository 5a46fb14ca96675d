"""`draftwood train` as a user meets it: every method to a drafter that decodes, stopped and gone on with, refused."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from typer.testing import CliRunner

from draftwood.assembly import build_drafter
from draftwood.cli import app
from draftwood.config import EngineConfig
from draftwood.drafters.model import ModelDrafter
from draftwood.engine.llm import LLM
from draftwood.errors import CheckpointError, IncompatibleParts, InvalidRequest
from draftwood.model.checkpoint import open_checkpoint
from draftwood.nets import export as exporting
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.export import export
from draftwood.nets.student import Student
from draftwood.protocols import Span, StepReport
from draftwood.request import FinishReason, SamplingParams
from draftwood.settling import settle
from draftwood.train import data, state
from draftwood.train import run as running
from draftwood.train.attention import Causal, causal_mask
from draftwood.train.data import Corpus, PackedBatches, invent_prompts
from draftwood.train.evaluate import Tally, held_out_batches, held_out_figures
from draftwood.train.grading import Paced
from draftwood.train.loop import TrainConfig, Trainer
from draftwood.train.recipes import RECIPES, find_recipe
from draftwood.train.run import TrainJob, build, run
from tiny import CPU, tiny_folder

SMALL = ("--steps", "4", "--rows", "2", "--length", "64", "--answers", "16", "--held-out", "4", "--device", "cpu")
SETTINGS = {
    "eagle3": ("layers=1,reads=2",),
    "peagle": ("layers=1", "reads=2", "guesses=3"),
    "eagle": (),
    "block": ("layers=1", "size=4", "rank=8", "reads=2"),
    "medusa": ("heads=3",),
    "hydra": ("heads=2", "layers=1"),
    "kangaroo": ("exit_layer=1",),
    "student": ("layers=1",),
    "pard": ("layers=2", "guesses=3"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("models") / "tiny", layers=3))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "prompts.txt"
    path.write_text("".join(f"What is {i} + {7 * i % 13}?\n" for i in range(16)))
    return str(path)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))


def command(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["train", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def train(method: str, target: str, prompts: str, out: Path, *more: str) -> Any:
    settings = [part for text in SETTINGS[find_recipe(method)[0]] for part in ("--set", text)]
    return command(method, "--model", target, "--data", prompts, "--out", str(out), *SMALL, *settings, *more)


def assert_refused(result: Any, *words: str) -> None:
    assert result.exit_code == 1, result.stderr
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def finished(target: str, prompts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of `medusa`, and the target's answers."""
    out = tmp_path_factory.mktemp("finished")
    assert train("medusa", target, prompts, out).exit_code == 0
    return out


def answered(finished: Path, folder: Path) -> Path:
    """`folder` with the target's answers in it, where a test is about what comes after them."""
    folder.mkdir(exist_ok=True)
    for path in finished.glob("answers-*.safetensors"):
        shutil.copy(path, folder)
    return folder


def weights(out: Path, method: str = "eagle3") -> bytes:
    return (out / method / "drafter" / "model.safetensors").read_bytes()


def info(out: Path, method: str = "eagle3") -> dict[str, Any]:
    return json.loads((out / method / "drafter" / "config.json").read_text())["draftwood"]["info"]


# --- from prompts to a drafter


@pytest.mark.parametrize("method", list(RECIPES))
def test_every_method_ends_in_a_drafter_that_decodes(method: str, target: str, prompts: str, out: Path) -> None:
    result = train(method, target, prompts, out, *(() if RECIPES[method].whole_vocabulary else ("--vocabulary", "200")))
    assert result.exit_code == 0, result.stderr
    drafter = out / method / "drafter"
    assert f'draftwood generate "…" --model {target} --drafter {drafter}\n' in result.stdout
    assert "Tokens a step" in result.stdout
    figures = info(out, method)
    assert figures["recipe"] == method
    assert figures["steps"] == 4
    assert figures["settings"].keys() == RECIPES[method].defaults.keys()
    assert figures["data"]["held_out"] == 4
    assert figures["held_out"]["chain"] >= 1
    assert all(figures["decoding"][side]["tokens_per_step"] >= 1 for side in ("greedy", "sampled"))
    assert target not in json.dumps(figures)
    params = SamplingParams(max_tokens=24)
    asked = ["What is 3 + 4?", "Once upon a time"]
    with LLM(target, config=EngineConfig(device="cpu")) as plain:
        expected = [r.token_ids for r in plain.generate(asked, params)]
    with LLM(target, drafter=str(drafter), config=EngineConfig(device="cpu", controller="fixed")) as llm:
        found = llm.generate(asked, params)
        assert llm.engine.drafter.max_nodes > 0
    assert [r.token_ids for r in found] == expected
    assert all(r.stats.drafted > 0 for r in found)
    assert len(list(out.glob("answers-*"))) == 1  # all methods learn from the same, and nothing is left lying about


def test_a_finished_run_says_so_and_exports_again_only_what_is_missing(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train("distill", target, prompts, tmp_path, "--export", "float32")
    assert "The target answers 16 prompts" in first.stderr
    before = weights(tmp_path, "student"), info(tmp_path, "student")
    again = train("student", target, prompts, tmp_path, "--export", "float32")
    assert "finished" in again.stderr
    assert "answers" not in again.stderr
    assert again.stdout == first.stdout
    shutil.rmtree(tmp_path / "student" / "drafter")
    monkeypatch.setattr(Trainer, "_take_step", lambda *_: pytest.fail("there is nothing to learn any more"))
    assert train("student", target, prompts, tmp_path, "--export", "float32").exit_code == 0
    assert (weights(tmp_path, "student"), info(tmp_path, "student")) == before
    assert_refused(train("student", target, prompts, tmp_path, "--seed", "1"), "begun with other settings", "seed")
    assert_refused(train("student", target, prompts, tmp_path, "--rows", "1"), "rows", "another folder")


# --- stopped and gone on with


def test_ctrl_c_saves_and_the_same_command_goes_on(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    assert train("block", target, prompts, answered(finished, tmp_path / "whole")).exit_code == 0
    take_step, steps = Trainer._take_step, iter(range(100))

    def interrupted(self: Trainer, stream: Any) -> dict[str, float]:
        if next(steps) == 1:
            signal.raise_signal(signal.SIGINT)
        return take_step(self, stream)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", interrupted)
        stopped = train("block", target, prompts, tmp_path / "parts")
    assert stopped.exit_code == 130
    assert "Saved after step 2 of 4. Run the same command again to go on." in stopped.stderr
    assert not (tmp_path / "parts" / "block" / "drafter").exists()
    again = train("block", target, prompts, tmp_path / "parts")
    assert "Going on after step 2 of 4" in again.stderr
    assert "The target answers" not in again.stderr
    assert weights(tmp_path / "parts", "block") == weights(tmp_path / "whole", "block")
    assert info(tmp_path / "parts", "block") == info(tmp_path / "whole", "block")


def test_a_killed_run_ends_in_the_same_weights(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        answered(finished, folder)
    config = TrainConfig(steps=6, save_every=2, evaluate_every=2)
    job = TrainJob(
        "eagle3", target, (Path(prompts),), tmp_path / "whole", {}, config, rows=2, length=64, answers=16, device="cpu"
    )
    quiet: list[str] = []
    assert run(job, quiet.append, quiet.append).info is not None
    take_step, steps = Trainer._take_step, iter(range(100))

    def killed(self: Trainer, stream: Any) -> dict[str, float]:
        if next(steps) == 3:
            raise RuntimeError("killed")
        return take_step(self, stream)

    job = dataclasses.replace(job, folder=tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run(job, quiet.append, quiet.append)
    assert run(job, quiet.append, quiet.append).info is not None
    assert "Going on after step 2 of 6." in quiet
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_checkpoints_come_as_often_as_asked(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        answered(finished, folder)
    more = ("--steps", "12", "--checkpoint-every", "2")
    assert train("medusa", target, prompts, tmp_path / "whole", "--steps", "12").exit_code == 0
    take_step, steps = Trainer._take_step, iter(range(100))

    def killed(self: Trainer, stream: Any) -> dict[str, float]:
        if next(steps) == 6:
            raise RuntimeError("killed")
        return take_step(self, stream)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train("medusa", target, prompts, tmp_path / "parts", *more)
    again = train("medusa", target, prompts, tmp_path / "parts", *more)
    assert "Going on after step 6 of 12" in again.stderr
    assert weights(tmp_path / "parts", "medusa") == weights(tmp_path / "whole", "medusa")
    assert_refused(train("medusa", target, prompts, tmp_path / "no", "--checkpoint-every", "0"), "must be positive")


# --- a full disk

FULL = OSError(errno.ENOSPC, "No space left on device", "somewhere")
RUST = SafetensorError('Error while serializing: I/O error: Os { code: 28, message: "No space left on device" }')


@dataclasses.dataclass(frozen=True)
class Writer:
    """Something that writes, and on a full disk fails the first time it is called after `calls` times."""

    place: Any
    name: str
    calls: int
    kept: str
    error: Exception = FULL


WRITERS = {
    "job": Writer(state, "write_text", 0, "Nothing had been kept yet."),
    "first answers": Writer(Corpus, "save", 0, "Nothing had been kept yet."),
    "all answers": Writer(data, "save_file", 1, "The answers so far are kept", RUST),
    "journal": Writer(state.Journal, "write", 0, "Training up to step 2 is kept."),
    "first checkpoint": Writer(state, "save_file", 0, "training has no checkpoint yet"),
    "second checkpoint": Writer(state, "save_file", 3, "Training up to step 2 is kept.", RUST),
    "drafter": Writer(exporting, "save_file", 0, "Training up to step 4 is kept.", RUST),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_a_sentence_and_the_same_command_goes_on(
    name: str, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    writer = WRITERS[name]
    if writer.kept.startswith(("Training", "training")):
        answered(finished, tmp_path)
    real, calls = getattr(writer.place, writer.name), iter(range(1000))

    def write(*arguments: Any, **named: Any) -> Any:
        if next(calls) == writer.calls:
            raise writer.error
        return real(*arguments, **named)

    often = ("--checkpoint-every", "2")
    with monkeypatch.context() as patch:
        patch.setattr(writer.place, writer.name, write)
        stopped = train("medusa", target, prompts, tmp_path, *often)
    assert_refused(stopped, "the disk is full", writer.kept, "run the same command again to go on")
    assert not list(tmp_path.rglob("*.partial")), "what is half written only takes room"
    assert train("medusa", target, prompts, tmp_path, *often).exit_code == 0
    assert weights(tmp_path, "medusa") == weights(finished, "medusa")


def test_a_disk_that_stays_full_costs_nothing_that_was_written(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    """Files that a resumed run writes again are replaced, never emptied first."""
    assert train("medusa", target, prompts, answered(finished, tmp_path), "--checkpoint-every", "2").exit_code == 0
    shutil.rmtree(tmp_path / "medusa" / "drafter")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_text = Path.write_text

    def full(self: Path, text: str, *arguments: Any, **named: Any) -> int:
        write_text(self, "", *arguments, **named)
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert_refused(train("medusa", target, prompts, tmp_path, "--checkpoint-every", "2"), "the disk is full")
    assert {path: path.read_bytes() for path in before} == before
    assert train("medusa", target, prompts, tmp_path, "--checkpoint-every", "2").exit_code == 0
    assert weights(tmp_path, "medusa") == weights(finished, "medusa")


def test_answers_are_kept_wave_by_wave(
    target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "EngineConfig", functools.partial(EngineConfig, max_running=3))  # waves of 6 prompts
    assert train("medusa", target, prompts, tmp_path / "whole").exit_code == 0
    generate, calls = LLM.generate, []

    def interrupted(self: LLM, asked: Any, params: Any) -> Any:
        calls.append(len(asked))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return generate(self, asked, params)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate", interrupted)
        stopped = train("medusa", target, prompts, tmp_path / "parts")
    assert calls == [3, 3, 3, 3]
    assert stopped.exit_code == 130
    assert "what is done is kept" in stopped.stderr
    again = train("medusa", target, prompts, tmp_path / "parts")
    assert "The target answers 16 prompts, 6 of which it has before." in again.stderr
    assert weights(tmp_path / "parts", "medusa") == weights(tmp_path / "whole", "medusa")


def test_a_time_limit_and_patience_end_a_run(target: str, prompts: str, tmp_path: Path) -> None:
    short = train("eagle", target, prompts, tmp_path, "--time-limit", "0.000001")
    assert short.exit_code == 0
    assert "Run the same command again" in short.stderr
    assert not (tmp_path / "eagle" / "drafter").exists()
    flags = ("--muon-lr", "1e-9", "--evaluate-every", "1", "--patience", "1")
    assert_refused(train("eagle", target, prompts, tmp_path, *flags), "other settings: optimizer")
    shutil.rmtree(tmp_path / "eagle")
    bored = train("eagle", target, prompts, tmp_path, *flags)
    assert bored.exit_code == 0
    assert (info(tmp_path, "eagle")["steps"], info(tmp_path, "eagle")["best_step"]) == (2, 1)


# --- refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonsense",), ("no method 'nonsense'", "eagle3", "distill")),
        (("eagle3", "--set", "depth=2"), ("no setting 'depth'", "layers, reads, rank, normed")),
        (("eagle3", "--set", "layers=two"), ("layers is a whole number, not 'two'",)),
        (("eagle3", "--set", "layers=0"), ("layers must be at least 1",)),
        (("eagle3", "--set", "normed=maybe"), ("normed is true or false",)),
        (("eagle3", "--set", "layers"), ("write name=value",)),
        (("block", "--set", "correction=magic"), ("markov, hidden, none",)),
        (("student", "--vocabulary", "100"), ("whole vocabulary",)),
        (("eagle3", "--loss", "kl=x"), ("must be a number",)),
        (("eagle3", "--loss", "magic"), ("magic",)),
        (("eagle3", "--temperatures", "0;1"), ("separated by commas",)),
        (("eagle3", "--temperatures", "-1"), ("0 or above",)),
        (("eagle3", "--epochs", "2"), ("either in steps or in epochs",)),
        (("eagle3", "--optimizer", "sgd"), ("muon or adamw",)),
        (("eagle3", "--schedule", "linear"), ("wsd",)),
        (("eagle3", "--export", "int8"), ("bfloat16, float16 or float32",)),
        (("eagle3", "--answers", "0"), ("answers must be at least 1",)),
        (("eagle3", "--held-out", "-1"), ("held_out must not be negative",)),
        (("eagle3", "--held-out", "16"), ("none left to learn from", "hold out fewer")),
        (("eagle3", "--rows", "500"), ("fewer rows",)),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: tuple[str, ...], target: str, prompts: str, out: Path) -> None:
    assert_refused(
        command(arguments[0], "-m", target, "--data", prompts, "--out", str(out / "no"), *SMALL, *arguments[1:]), *words
    )


def test_data_must_be_there(target: str, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    assert_refused(command("eagle3", "-m", target, *out), "--data FILE")
    assert_refused(command("eagle3", "-m", target, "--data", str(empty)), "--out FOLDER")
    assert_refused(command("eagle3", "-m", target, "--data", str(empty), *out), "no prompts")
    assert_refused(command("eagle3", "-m", target, "--data", str(tmp_path / "none.txt"), *out), "cannot be read")
    assert_refused(command(), "draftwood train --list")
    assert not (tmp_path / "out").exists()
    empty.write_text("x" * 600 + "\n")
    assert_refused(command("eagle3", "-m", target, "--data", str(empty), *out, *SMALL), "none of the 1 prompts")


def test_the_list_names_every_recipe_and_setting() -> None:
    result = command("--list")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in (*RECIPES, "distill", "reads=3", "grounded=true", "tv=0.9"))


def test_settings_take_the_types_of_their_defaults() -> None:
    recipe = RECIPES["block"]
    assert recipe.parse(["layers=3, confidence=no", "correction=none, weights=dpace"]) == {
        "layers": 3,
        "confidence": False,
        "correction": "none",
        "weights": "dpace",
    }
    with pytest.raises(InvalidRequest, match="weights is one of decay, dpace"):
        recipe.parse(["weights=heavy"])
    with pytest.raises(InvalidRequest, match="no setting 'x'"):
        recipe.complete({"x": 1})


def test_drafts_may_be_weighed_by_their_acceptance_and_lost_as_a_whole(
    target: str, prompts: str, tmp_path: Path
) -> None:
    result = train("block", target, prompts, tmp_path, "--set", "weights=dpace", "--loss", "tv=1,e2e=0.5")
    assert result.exit_code == 0, result.stderr
    figures = info(tmp_path, "block")
    assert figures["settings"]["weights"] == "dpace"
    assert figures["loss"] == {"tv": 1.0, "e2e": 0.5}
    job = TrainJob("block", target, (), tmp_path, {"weights": "dpace"}, rows=2, length=64, device="cpu", vocabulary=0)
    method = build(job, open_checkpoint(target), Corpus.of([(range(5), range(40, 60))]))
    assert isinstance(method.weigh, Paced)


@pytest.mark.parametrize("method", list(RECIPES))
def test_every_method_learns_in_half_as_many_bits_without_a_warning(method: str, target: str, tmp_path: Path) -> None:
    """As it does on a GPU: weights of 32 bits meet inputs that autocast has rounded to 16."""
    corpus = Corpus.of([(range(5 + i), range(40, 60 + i)) for i in range(9)])
    settings = dict(part.split("=") for text in SETTINGS[method] for part in text.split(","))
    numbers = {name: int(value) for name, value in settings.items()}
    job = TrainJob(method, target, (), tmp_path, numbers, rows=2, length=64, device="cpu", vocabulary=0)
    made = build(job, open_checkpoint(target), corpus)
    torch.set_warn_always(True)  # else torch says it once, to whoever comes first
    try:
        with torch.autocast("cpu", torch.bfloat16):
            loss = made.losses(next(PackedBatches(corpus, 2, 64).epoch(0, 0)))["loss"]
        loss.backward()
    finally:
        torch.set_warn_always(False)
    slopes = [each.grad for each in made.module.parameters() if each.grad is not None]
    assert slopes
    assert all(slope.isfinite().all() for slope in slopes)


# --- figures


def test_held_out_figures_are_always_the_same_and_disturb_nothing(target: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(target)
    corpus = Corpus.of([(range(5 + i), range(40, 60 + i)) for i in range(9)])
    job = TrainJob("block", target, (), tmp_path, {"rank": 8}, rows=2, length=64, device="cpu", vocabulary=0)
    method = build(job, checkpoint, corpus)
    batches = held_out_batches(corpus, 2, 64)
    assert len(batches) == 3
    assert len({len(batch.tokens) for batch in batches}) == 1
    before = torch.get_rng_state()
    first = held_out_figures(method, batches)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert held_out_figures(method, batches) == first
    assert method.module.training
    alive, chain = 1.0, 1.0
    for depth in range(1, 7):
        alive *= first[f"agree_{depth}"]
        chain += alive
    assert first["chain"] == pytest.approx(chain)
    short = held_out_figures(method, PackedBatches(Corpus.of([(range(9), (1,))]), 1, 64).epoch(0, 0))
    assert short["chain"] == 1 + short["agree_1"]
    assert "agree_2" not in short
    with pytest.raises(InvalidRequest, match="too short"):
        held_out_figures(method, [])


def test_a_tally_counts_by_depth() -> None:
    tally = Tally(3)
    tally.observe(StepReport(0, 0, 0, 0, 0, outcomes=((0, 0), (3, 3), (3, 1), (3, 0), (1, 1))))
    assert tally.by_depth() == (3 / 4, 1 / 2, 1.0)
    assert Tally(3).by_depth() == ()


# --- students on disk


def test_an_exported_student_is_the_network(target: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(target)
    torch.manual_seed(1)
    net = Student(dataclasses.replace(checkpoint.config, num_layers=2, windows=(None, None))).requires_grad_(False)
    for _ in range(2):  # a student may be replaced by a student
        export(net, tmp_path, "tiny", {"steps": 1}, dtype=torch.float32)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "embed" in name or "lm_head" in name]  # noqa: SIM118
    config = settle(EngineConfig(device="cpu"), checkpoint, str(tmp_path))
    drafter = build_drafter(str(tmp_path), None, checkpoint, config)
    assert isinstance(drafter, ModelDrafter)
    tokens = [72, 101, 108, 108, 111, 33]
    cache = drafter.runner.cache
    cache.tables.open(0, [])
    cache.tables.reserve(0, len(tokens))
    rows = torch.arange(len(tokens))
    found = drafter.runner.forward(cache.stage_text([Span(0, tokens, 0, len(tokens))], rows)).logits
    batch = next(PackedBatches(Corpus.of([(tokens[:1], tokens[1:])]), 1, len(tokens)).epoch(0, 0))
    words = TargetEmbeddings(checkpoint, CPU, torch.float32)
    hidden = net.run(words.embed(batch.tokens), batch.positions, Causal(causal_mask(batch)))
    torch.testing.assert_close(found, hidden[0] @ words.head().T, rtol=1e-4, atol=1e-4)


def test_a_student_of_another_target_is_refused(target: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(target)
    one = dataclasses.replace(checkpoint.config, num_layers=1, windows=(None,))
    config = settle(EngineConfig(device="cpu"), checkpoint, "none")
    export(Student(dataclasses.replace(one, vocab_size=99)), tmp_path / "other", "other", {})
    with pytest.raises(IncompatibleParts, match="vocab_size is 99"):
        build_drafter(str(tmp_path / "other"), None, checkpoint, config)
    broken = Student(one)
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan  # type: ignore[union-attr,index,operator]
    export(broken, tmp_path / "broken", "tiny", {})
    with pytest.raises(CheckpointError, match="NaN"):
        build_drafter(str(tmp_path / "broken"), None, checkpoint, config)
    described = json.loads((tmp_path / "broken" / "config.json").read_text())
    (tmp_path / "broken" / "config.json").write_text(json.dumps(described | {"intermediate_size": 7}))
    with pytest.raises(CheckpointError, match="where its configuration says"):
        build_drafter(str(tmp_path / "broken"), None, checkpoint, config)


class Inventor:
    """As much of an LLM as `invent_prompts` needs, whose answers are known."""

    config = EngineConfig(device="cpu", max_running=2)

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.asked = texts, []
        self.tokenizer = self

    has_chat_template = True

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        return f"<user>{messages[0]['content']}<end><answer>"

    def encode(self, text: str, *, special: bool) -> list[int]:
        assert not special
        return list(text.encode())

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
        self.asked.append((bytes(prompts[0]).decode(), params.seed, params.n))
        written = [
            dataclasses.make_dataclass("Completion", ["text", "finish_reason"])(
                self.texts.pop(0), FinishReason.STOP if params.n else FinishReason.LENGTH
            )
            for _ in range(params.n)
        ]
        return [dataclasses.make_dataclass("Result", ["completions"])(written)]


def test_prompts_are_invented_where_a_user_would_begin_and_none_twice() -> None:
    inventor: Any = Inventor(
        ["why is the sky blue?", "short", "why is the sky blue?", " how are tides made? ", "x" * 20]
    )
    waves = list(invent_prompts(inventor, 5, seed=7))
    assert waves == [["why is the sky blue?"], ["how are tides made?"], ["x" * 20]]
    assert inventor.asked == [("<user>", 7, 2), ("<user>", 9, 2), ("<user>", 11, 1)]


def test_who_knows_no_conversations_cannot_invent_prompts() -> None:
    silent: Any = Inventor([])
    silent.has_chat_template = False
    with pytest.raises(InvalidRequest, match="conversations"):
        next(invent_prompts(silent, 1))


def test_invented_prompts_are_written_once_and_count_as_data(target: str, tmp_path: Path) -> None:
    job = TrainJob("student", target, (), tmp_path, invent=8, device="cpu")
    found = running._prompts(job)
    assert found
    (kept,) = tmp_path.glob("prompts-*.json")
    assert sorted(json.loads(kept.read_text())) == sorted(found)
    kept.write_text(json.dumps(["what is a tree made of?"]))
    assert running._prompts(job) == ["what is a tree made of?"]
