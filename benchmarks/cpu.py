"""SmolLM2 on a CPU, batch 1, greedy: ours in every weight format against other engines, all in one run.

python benchmarks/cpu.py [--only ours,openvino:int8] [--rounds 3] [--prompts FILE | --data FOLDER --every 80] [--quick]

Every contender is a process of its own. All of them get the same token ids in turn, the order reversed every other
round; end of text is ignored. `make bench-cpu` installs the peers into an environment of their own first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import cpu_prompts
from common import ROOT, report
from cpu_peers import LOOKED_UP, LOOKUP, PLAIN, RIGHT
from cpu_peers.processes import Environments, Failure, Key, Process
from draftwood.model.checkpoint import open_checkpoint

OUR_FORMATS = ("float32", "bfloat16", "int8", "int4", "w8a8", "w4a8", "stored")
RIGHT_FORMATS = ("float32", "w8a8")
PEERS = {"transformers": ("float32",), "llamacpp": ("f32", "q8_0", "q4_1"), "openvino": ("float32", "int8", "int4")}
ROWS = (1, 2, 4, 8, 16)
STEP_CONTEXT = 200
PREFILL = 512
WAKE_UP = 12  # tokens read and written, untimed, right before each answer: idle processes lose caches and pages
PAUSE = 0.05  # seconds until the threads of the last one asked are surely asleep

Row = tuple[str, float | None, str, float | None, str]


@dataclass
class Figures:
    """What was measured of one contender."""

    version: str
    speeds: dict[tuple[int, int], float] = field(default_factory=dict)  # (round, prompt) -> tokens a second
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    writing: list[float] = field(default_factory=list)  # tokens a second after the first one, where an engine tells
    steps: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in ROWS})
    prefills: list[float] = field(default_factory=list)  # tokens a second
    bytes: int | None = None

    @property
    def speed(self) -> float:
        """Median over rounds and prompts."""
        return statistics.median(self.speeds.values())

    @property
    def overall(self) -> float:
        """All prompts one after the other, each one's median over the rounds: slow ones weigh more."""
        prompts = sorted({prompt for _, prompt in self.speeds})
        medians = [statistics.median(v for (_, p), v in self.speeds.items() if p == prompt) for prompt in prompts]
        return statistics.harmonic_mean(medians)

    def step(self, rows: int) -> float | None:
        """Median seconds of a step of so many rows."""
        return statistics.median(self.steps[rows]) if self.steps[rows] else None

    @property
    def prefill(self) -> float | None:
        return statistics.median(self.prefills) if self.prefills else None


class Arena:
    """All contenders that still stand, and why the others fell."""

    def __init__(self, keys: Sequence[Key], places: Environments) -> None:
        self.keys = keys
        self.missing: dict[Key, str] = {}
        self.figures: dict[Key, Figures] = {}
        self._processes: dict[Key, Process] = {}
        for key in keys:
            print(f"starting {key}", file=sys.stderr, flush=True)
            with self._guarded(key):
                self._processes[key] = Process(key, places)
                self.figures[key] = Figures(self._processes[key].version)

    @contextmanager
    def _guarded(self, key: Key) -> Iterator[None]:
        """A failure puts the contender out and is kept as the reason; everybody else goes on."""
        try:
            yield
        except Failure as failure:
            self.missing[key] = str(failure)
            if key in self.figures and self.figures[key].bytes is None:
                del self.figures[key]  # it has not answered everything
            process = self._processes.pop(key, None)
            if process is not None:
                process.close()
            print(f"missing: {key}: {failure}", file=sys.stderr, flush=True)

    def each(self, turn: int, run: Callable[[Key, Process, Figures], None]) -> None:
        """`run` for every contender, the other way round in odd turns; those that need an answer come last."""
        order = list(self._processes) if turn % 2 == 0 else list(reversed(self._processes))
        for key in sorted(order, key=lambda key: key.mode == RIGHT):
            with self._guarded(key):
                run(key, self._processes[key], self.figures[key])
            time.sleep(PAUSE)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def contenders(only: Sequence[str]) -> Iterator[Key]:
    """Every contender, or those whose engine or engine:format is named."""
    for engine, forms in {"ours": OUR_FORMATS, **PEERS}.items():
        for form in forms:
            right = (RIGHT,) if engine == "ours" and form in RIGHT_FORMATS else ()
            if not only or engine in only or f"{engine}:{form}" in only:
                yield from (Key(engine, form, mode) for mode in (PLAIN, LOOKUP, *right))


def answer_prompts(arena: Arena, prompts: Callable[[int], list[list[int]]], tokens: int, rounds: int) -> None:
    """Tokens a second of whole answers, prompt by prompt, after a warm-up that is not counted."""
    wake_up = cpu_prompts.noise(WAKE_UP, 0)
    for turn in range(-1, rounds):
        for i, prompt in enumerate(prompts(turn + 1)[: 1 if turn < 0 else None]):
            print(f"round {turn + 1} of {rounds}, prompt {i + 1}", file=sys.stderr, flush=True)

            def answer(key: Key, process: Process, own: Figures, at=(turn, i), prompt=prompt) -> None:
                known = known_answer(arena, key, at)
                process.ask("generate", prompt=wake_up, max_tokens=WAKE_UP)
                reply = process.ask("generate", prompt=prompt, max_tokens=tokens, answer=known)
                if len(reply["tokens"]) != tokens:
                    raise Failure(f"gave {len(reply['tokens'])} tokens instead of {tokens}")
                own.answers[at] = reply["tokens"]
                if at[0] >= 0:
                    own.speeds[at] = tokens / reply["seconds"]
                    own.writing += [reply["writing"]] if reply["writing"] else []

            arena.each(turn, answer)


def known_answer(arena: Arena, key: Key, at: tuple[int, int]) -> list[int]:
    """What the same weights said without drafts, if this contender is to know it."""
    if key.mode != RIGHT:
        return []
    plain = arena.figures.get(key._replace(mode=PLAIN))
    if plain is None or at not in plain.answers:
        raise Failure("nobody gave the plain answer that its drafts come from")
    return plain.answers[at]


def measure_memory(arena: Arena) -> None:
    """Before anything else is measured that an engine's user would not do."""

    def read(key: Key, process: Process, own: Figures) -> None:
        own.bytes = process.ask("memory")["bytes"]

    arena.each(0, read)


def measure_steps(arena: Arena, rounds: int) -> None:
    """Steps of several row counts and prefill, of contenders that do not draft."""
    for turn in range(rounds):
        print(f"steps, round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
        context, more, prompt = (
            cpu_prompts.noise(length, 3 * turn + i) for i, length in enumerate((STEP_CONTEXT, max(ROWS), PREFILL))
        )

        def measure(key: Key, process: Process, own: Figures, context=context, more=more, prompt=prompt) -> None:
            if key.mode != PLAIN:
                return
            own.prefills.append(PREFILL / process.ask("generate", prompt=prompt, max_tokens=1)["seconds"])
            for rows, seconds in process.ask("steps", context=context, more=more, rows=ROWS)["seconds"].items():
                own.steps[int(rows)].append(seconds)

        arena.each(turn, measure)


class Table:
    """Rows from figures. A row about contenders that were not asked for is left out, a failed one is missing."""

    def __init__(self, arena: Arena) -> None:
        self._figures = arena.figures
        self._asked = set(arena.keys)
        self.rows: list[Row] = []

    def ratio(
        self,
        what: str,
        measure: Callable[[Figures], float | None],
        above: Key,
        below: Key,
        target: float | None = None,
        direction: str = ">=",
    ) -> None:
        """One contender's figure over another's."""
        if {above, below} <= self._asked:
            upper, lower = (self._value(key, measure) for key in (above, below))
            value = upper / lower if upper is not None and lower else None
            self.rows.append((what, value, "x", target, direction))

    def of(self, key: Key, what: str, measure: Callable[[Figures], float | None], unit: str, *target) -> None:
        """One contender's figure."""
        if key in self._asked:
            self.rows.append((what, self._value(key, measure), unit, *(target or (None, ""))))

    def _value(self, key: Key, measure: Callable[[Figures], float | None]) -> float | None:
        return measure(self._figures[key]) if key in self._figures else None

    def best(self, engine: str, mode: str) -> Key | None:
        """The fastest of an engine's formats."""
        found = [key for key in self._figures if key.engine == engine and key.mode == mode]
        return max(found, key=lambda key: self._figures[key].speed, default=None)


def speed(figures: Figures) -> float:
    return figures.speed


def step_cost(rows: int) -> Callable[[Figures], float | None]:
    """A step of `rows` over a step of one."""

    def cost(figures: Figures) -> float | None:
        one, many = figures.step(1), figures.step(rows)
        return many / one if one and many else None

    return cost


def writing(figures: Figures) -> float | None:
    return statistics.median(figures.writing) if figures.writing else None


def plain(engine: str, form: str) -> Key:
    return Key(engine, form, PLAIN)


def speed_rows(table: Table) -> None:
    for form, peer, target in (("float32", "float32", 1.0), ("w8a8", "int8", 0.8), ("w4a8", "int4", 0.85)):
        what = f"plain: ours {form} / OpenVINO {peer}"
        table.ratio(what, speed, plain("ours", form), plain("openvino", peer), target)


def step_rows(table: Table, arena: Arena) -> None:
    targets = {("float32", 4): 1.25, ("w8a8", 4): 1.25, ("w4a8", 4): 1.5, ("float32", 16): 1.9, ("w8a8", 16): 1.8}
    for (form, rows), target in targets.items():
        table.of(plain("ours", form), f"{rows}-row step / 1-row: ours {form}", step_cost(rows), "x", target, "<=")
    for rows in (4, 16):
        for key in arena.keys:
            if key.mode == PLAIN and (key.engine != "ours" or (key.form, rows) not in targets):
                table.of(key, f"{rows}-row step / 1-row: {key.engine} {key.form}", step_cost(rows), "x")


def draft_rows(table: Table) -> None:
    best = table.best("ours", LOOKUP)
    if best is not None:
        looked_up = f"OpenVINO int4, {LOOKED_UP['openvino']} looked up"
        table.ratio(f"n-gram: ours {best.form} / {looked_up}", speed, best, Key("openvino", "int4", LOOKUP), 1.0)
    for engine, forms in {"ours": OUR_FORMATS, **PEERS}.items():
        for form in forms:
            table.ratio(f"n-gram / plain: {engine} {form}", speed, Key(engine, form, LOOKUP), plain(engine, form))
    for form, target in zip(RIGHT_FORMATS, (2.7, 3.0), strict=True):
        known = Key("ours", form, RIGHT)
        # No draft makes a prompt shorter, so the target is for what comes after it.
        table.ratio(
            f"always-right draft of 3 / plain, writing: ours {form}", writing, known, plain("ours", form), target
        )
        table.ratio(f"always-right draft of 3 / plain, prompt included: ours {form}", speed, known, plain("ours", form))


def other_rows(table: Table, arena: Arena) -> None:
    table.ratio(
        "prefill: ours float32 / transformers float32",
        lambda own: own.prefill,
        plain("ours", "float32"),
        plain("transformers", "float32"),
        1.2,
    )
    megabytes = "peak memory: ours w8a8"
    table.of(plain("ours", "w8a8"), megabytes, lambda own: own.bytes and own.bytes / 1e6, "MB", 350, "<=")
    for key in arena.keys:
        table.of(key, f"tokens per second: {key}", speed, "")


def agreement(arena: Arena) -> dict[str, float]:
    """Share of answers that equal those of the same weights without drafts, or of transformers' plain float32."""
    shares = {}
    for key, own in arena.figures.items():
        exact = key.engine != "transformers" and key.mode == PLAIN and key.form in ("float32", "f32", "stored")
        other = plain("transformers", "float32") if exact else key._replace(mode=PLAIN)
        if other in arena.figures and other != key:
            theirs = arena.figures[other].answers
            same = [theirs.get(at) == tokens for at, tokens in own.answers.items()]
            shares[f"{key} = {other}"] = sum(same) / len(same)
    return shares


def print_overview(arena: Arena) -> None:
    """Everything absolute, a line for each contender."""
    costs = " ".join(f"{f'x{rows}':>5s}" for rows in ROWS[1:])
    head = f"{'tok/s':>7s} {'overall':>8s} {'row, ms':>8s} {costs} {'prefill/s':>10s} {'peak MB':>8s}"
    print(f"\n{'contender':27s} {head}")
    for key, own in arena.figures.items():
        numbers = [f"{own.speed:7.1f}", f"{own.overall:8.1f}", _shown(own.step(1), "8.2f", 1e3)]
        numbers += [_shown(step_cost(rows)(own), "5.2f") for rows in ROWS[1:]]
        numbers += [_shown(own.prefill, "10.0f"), _shown(own.bytes, "8.0f", 1e-6)]
        print(f"{key!s:27s} {' '.join(numbers)}")
    for key, why in arena.missing.items():
        print(f"{key!s:27s} missing: {why}")
    print("\nshare of equal answers")
    for what, share in agreement(arena).items():
        print(f"  {what:70s} {share:6.0%}")


def _shown(value: float | None, form: str, factor: float = 1.0) -> str:
    width = int(form.split(".")[0])
    return " " * width if value is None else format(value * factor, form)


def details(arena: Arena) -> dict[str, object]:
    """For the JSON line: what each contender is, and what was measured of it."""
    contenders = {
        str(key): {
            "version": own.version,
            "tokens_per_second": round(own.speed, 2),
            "overall_tokens_per_second": round(own.overall, 2),
            "by_round_and_prompt": {f"{r}/{p}": round(v, 2) for (r, p), v in own.speeds.items()},
            "step_seconds": {rows: own.step(rows) for rows in ROWS},
            "prefill_tokens_per_second": own.prefill,
            "peak_bytes": own.bytes,
        }
        for key, own in arena.figures.items()
    }
    missing = {str(key): why for key, why in arena.missing.items()}
    return {"contenders": contenders, "missing": missing, "equal_answers": agreement(arena)}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rounds: int
    step_rounds: int
    tokens: int
    prompts: int | None  # None: all


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="engines, or engine:format, with commas between them")
    parser.add_argument("--prompts", type=Path, help="a text file, one prompt a line")
    parser.add_argument("--data", type=Path, help="a folder of .jsonl files with lines {id, task, turns}")
    parser.add_argument("--every", type=int, default=80, help="take every n-th prompt of --data")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="the peers' environment")
    parser.add_argument("--quick", action="store_true", help="one round, one prompt, 16 tokens: does everything run?")
    return parser.parse_args()


def chosen_prompts(given: argparse.Namespace) -> list[str]:
    if given.prompts:
        return cpu_prompts.from_file(given.prompts)
    return cpu_prompts.from_folder(given.data, given.every) if given.data else list(cpu_prompts.BUILT_IN)


def run(arena: Arena, texts: list[str], sizes: Sizes) -> None:
    tokenizer = open_checkpoint("smollm2").tokenizer()
    texts = texts[: sizes.prompts]
    answer_prompts(arena, lambda number: cpu_prompts.encoded(tokenizer, texts, number), sizes.tokens, sizes.rounds)
    measure_memory(arena)
    measure_steps(arena, sizes.step_rounds)


def main() -> int:
    given = arguments()
    torch.set_num_threads(given.threads)  # what provenance says; nothing is computed here
    keys = list(contenders([name for name in given.only.split(",") if name]))
    sizes = Sizes(1, 1, 16, 1) if given.quick else Sizes(given.rounds, given.rounds, given.tokens, None)
    arena = Arena(keys, Environments(given.peers.resolve(), given.threads))
    try:
        run(arena, chosen_prompts(given), sizes)
    finally:
        arena.close()
    table = Table(arena)
    speed_rows(table)
    step_rows(table, arena)
    draft_rows(table)
    other_rows(table, arena)
    print_overview(arena)
    return 0 if report(table.rows, "cpu", {"sizes": asdict(sizes), **details(arena)}) else 1


if __name__ == "__main__":
    sys.exit(main())
