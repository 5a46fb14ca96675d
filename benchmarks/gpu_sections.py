"""The sections of the GPU benchmark. Each prints as it goes and returns rows of the final table."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from draftwood.drafters.scripted import ScriptedDrafter
from draftwood.drafting import Drafter
from draftwood.engine.controller import FixedBudget
from draftwood.engine.worker import ComputeThread
from draftwood.model.grammar import json_grammar
from draftwood.request import SamplingParams
from gpu_measure import Figures, Lab, Row, Setup, ask, ask_for, step_seconds, timed_on_the_device, warm_up
from gpu_prompts import CHAT8, CODE8, MATHS8, STRICT64, chats

PLAIN = Setup()
ALWAYS_RIGHT = "strict always right"
GAP = 5.0  # microseconds without work from which on the GPU counts as waiting for the host
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
WISHES: Mapping[str, Mapping[str, object]] = {
    "logprobs": {"logprobs": 5},
    "penalty": {"repetition_penalty": 1.1},
    "bias": {"logit_bias": {11: 1.0}},
    "other law": {"law": "coupled"},
}
ALL_OF_THEM: Mapping[str, float] = {"logprobs": 0.85, "grammar": 0.7, "penalty": 0.9}
FIRST_LENGTHS = (128, 512, 2048, 8000)
ARITY = 4  # children a node of the trees that are only there to cost time
FORMATS = ("fp8", "int8", "int4")
TARGETS: Mapping[tuple[str, int, float], float] = {
    ("plain", 1, 0.0): 250,
    ("plain", 32, 0.0): 5900,
    ("plain", 256, 0.0): 22000,
    ("model", 1, 0.0): 900,
    ("model", 1, 1.0): 800,
    ("model", 32, 0.0): 12000,
}
RATIOS: Mapping[tuple[str, int, float], float] = {("ngram", 1, 0.0): 1.15, ("ngram", 32, 0.0): 1.0}

START = """
import sys, time
start = time.perf_counter()
from draftwood import SamplingParams
from draftwood.cli.flags import EngineFlags
from draftwood.cli.session import open_llm
llm = open_llm(EngineFlags(sys.argv[1], device=sys.argv[2]))
loaded = time.perf_counter()
next(iter(llm.stream("The lighthouse", SamplingParams(max_tokens=1))))
print(loaded - start, time.perf_counter() - start)
"""


def contenders(lab: Lab, temperature: float) -> dict[str, Setup]:
    """Who runs at a temperature: drafts that are drawn want another tree and another law."""
    depth, name = lab.sizes.depth, f"model:{lab.small}"
    drawn = Setup(name, f"sampled-chain:depth={depth}", "block")
    model = Setup(name, f"chain:depth={depth}") if temperature == 0 else drawn
    return {"plain": PLAIN, "ngram": Setup("ngram"), "model": model, ALWAYS_RIGHT: Setup("known", strict=True)}


def speed(lab: Lab) -> Iterator[Row]:
    """Plain, n-gram, draft model and always right, at every batch and temperature. Nobody could know what is said in
    fast mode: there, another number of rows rounds otherwise.
    """
    lab.scripts["known"] = lab.known
    found: dict[tuple[str, int, float], Figures] = {}
    head = f"{'contender':20s} {'batch':>5s} {'T':>3s} {'tok/s':>9s} {'/ plain':>8s} {'ms/step':>8s}"
    print(f"{head} {'tok/step':>8s} {'roofline':>8s}", flush=True)
    # Each engine once: both temperatures of one contender after each other, unless it has two engines.
    for name in contenders(lab, 0.0):
        if lab.contenders and name not in ("plain", *lab.contenders):
            continue
        for temperature in lab.sizes.temperatures:
            for batch in lab.sizes.batches:
                key = (name, batch, temperature)
                if name == ALWAYS_RIGHT:
                    lab.learn(batch, temperature)
                own = lab.measure(contenders(lab, temperature)[name], batch, temperature)
                found[key] = own
                plain = found["plain", batch, temperature].tokens_per_second
                line = (
                    f"{own.tokens_per_second:9.1f} {own.tokens_per_second / plain:8.2f} {own.step_seconds * 1e3:8.3f}"
                )
                shown = f"{name:20s} {batch:5d} {temperature:3.1f} {line}"
                print(f"{shown} {own.tokens_per_step:8.2f} {own.roofline:8.0%}", flush=True)
                yield from _speed_rows(key, own, plain)


def _speed_rows(key: tuple[str, int, float], own: Figures, plain: float) -> Iterator[Row]:
    name, batch, temperature = key
    what = f"{name}, batch {batch}, T={temperature:g}"
    yield f"{what}, tok/s", own.tokens_per_second, "", TARGETS.get(key), ">="
    if name == "plain":
        yield f"{what}, share of the memory's speed", own.roofline, "", None, ""
    else:
        yield f"{what}, / plain", own.tokens_per_second / plain, "x", RATIOS.get(key), ">="
        yield f"{what}, tokens a step", own.tokens_per_step, "", None, ""


def tree(lab: Lab) -> Iterator[Row]:
    """What a step costs with a tree that is always wrong, by its size, at batch 1: on the GPU, and with the host, which
    has to hear of one step before it can make the tree of the next.
    """
    size, sizes = [0], lab.sizes
    lab.scripts["wrong"] = lambda: wrong_tree(size, max(sizes.trees), lab.config.vocab_size)
    setup = Setup("wrong", max_running=1, cache_tokens=4096)
    llm = lab.open(setup)
    times: dict[int, tuple[float, float]] = {}
    for rows in sizes.trees:
        size[0] = rows - 1
        ComputeThread.shared().call(lambda: setattr(llm.engine, "controller", FixedBudget(size[0])))
        ask(llm, chats(llm.tokenizer, CHAT8, 1, 5000 + 10 * rows), sizes.warm_up, 0.0)
        on_the_device = timed_on_the_device(llm)
        asked = [
            ask(llm, chats(llm.tokenizer, CHAT8, 1, 5001 + 10 * rows + turn), sizes.tokens // 2, 0.0)[1]
            for turn in range(sizes.rounds)
        ]
        with_host = statistics.median(map(step_seconds, asked))
        times[rows] = on_the_device() or with_host, with_host
        own, whole = (mine / one for mine, one in zip(times[rows], times[sizes.trees[0]], strict=True))
        accepted = sum(results[0].stats.accepted for results in asked)
        shown = ", ".join(f"{seconds * 1e3:.3f} ms" for seconds in times[rows])
        print(f"{rows:4d} rows: {shown} with the host; {own:.3f}, {whole:.3f} of one; {accepted} accepted", flush=True)
        yield f"step with {rows} rows / 1 row, batch 1", own, "x", {64: 1.12, 128: 1.2}.get(rows), "<="
        yield f"step with {rows} rows made by the host / 1 row, batch 1", whole, "x", None, ""
    lab.close(setup)  # its controller is of no use to anybody else


def traffic(lab: Lab) -> Iterator[Row]:
    """Answers that end one by one, each making room for another prompt, beside as many that begin and end together."""
    sizes = lab.sizes
    for name, setup in contenders(lab, 0.0).items():
        if name == ALWAYS_RIGHT or (lab.contenders and name not in lab.contenders):
            continue
        for batch in sizes.batches[1:]:
            own = replace(setup, max_running=batch)
            llm, count = lab.open(own), 4 * batch
            lengths = [random.Random(i).randint(sizes.tokens // 8, sizes.tokens) for i in range(count)]
            prompts = [chats(llm.tokenizer, CHAT8, count, 10_000 * turn) for turn in range(1, 4)]
            warm_up(llm, prompts[0], lengths, 0.0)
            together, _ = ask(llm, prompts[1][:batch], sizes.tokens, 0.0)
            mixed, _ = ask(llm, prompts[2], lengths, 0.0)
            speed, share = sum(lengths) / mixed, sum(lengths) / mixed * together / (batch * sizes.tokens)
            print(f"{name:20s} {batch:5d} {speed:9.1f} tok/s, {share:.2f} of all at once", flush=True)
            yield f"{name}, batch {batch}, answers that end one by one, tok/s", speed, "", None, ""
            yield f"{name}, batch {batch}, the same / all at once", share, "x", None, ""
            lab.close(own)


def wrong_tree(size: Sequence[int], most: int, vocabulary: int) -> Drafter:
    """Trees of `size[0]` nodes, level by level, of tokens that change all the time and mean nothing."""

    def script(tokens: Sequence[int]) -> list[list[int]]:
        paths: list[list[int]] = [[]]
        for node in range(1, size[0] + 1):
            token = (len(tokens) * 257 + node * 7919) % vocabulary
            paths.append([*paths[(node - 1) // ARITY], token])
        return paths[1:]

    return ScriptedDrafter(script, most)


def strict(lab: Lab) -> Iterator[Row]:
    """What strict mode costs, and whether it keeps its promise."""
    batch, temperature = lab.sizes.batches[0], 0.0
    steps = {s: lab.measure(Setup(strict=s), batch, temperature).step_seconds for s in (False, True)}
    print(f"plain step: fast {steps[False] * 1e3:.3f} ms, strict {steps[True] * 1e3:.3f} ms", flush=True)
    yield "strict / fast, plain, batch 1, speed", steps[False] / steps[True], "x", 0.85, ">="
    setups = {
        "none": Setup(strict=True, law="match"),
        "ngram": Setup("ngram", strict=True, law="match"),
        "model chain": Setup(f"model:{lab.small}", f"chain:depth={lab.sizes.depth}", "match", strict=True),
        "model tree": Setup(f"model:{lab.small}", "static:widths=3x2x1x1", "match", strict=True),
        **{folder.name: Setup(str(folder), law="match", strict=True) for folder in lab.trained},
    }
    # Guesses are made whether they pay or not: a budget that makes none would leave nothing to be put to the test.
    setups = {name: replace(setup, whole=name != "none") for name, setup in setups.items()}
    if lab.contenders:
        setups = {name: setup for name, setup in setups.items() if name in ("none", *lab.contenders)}
    wanted: dict[float, list[tuple[int, ...]]] = {}
    for name, setup in setups.items():
        llm = lab.open(setup)
        prompts = chats(llm.tokenizer, STRICT64[: lab.sizes.strict_prompts], lab.sizes.strict_prompts, 7000)
        for temperature in (0.0, 0.8):
            _, results = ask(llm, prompts, lab.sizes.strict_tokens, temperature)
            got = [result.token_ids for result in results]
            same = sum(a == b for a, b in zip(wanted.setdefault(temperature, got), got, strict=True))
            steps_each = statistics.mean(result.stats.tokens_per_step for result in results)
            print(f"{name:12s} T={temperature:g}: {same}/{len(got)} equal, {steps_each:.2f} tok/step", flush=True)
            yield f"strict: {name}, T={temperature:g}, equal answers", same / len(got), "", 1.0, ">="
        if name == "none":
            yield from _one_by_one(lab, setup, prompts, wanted[0.0])


def _one_by_one(
    lab: Lab, setup: Setup, prompts: Sequence[Sequence[int]], wanted: Sequence[tuple[int, ...]]
) -> Iterator[Row]:
    """A few alone instead of together: the batch must not matter either, nor where a prompt was cut."""
    few = prompts[:: max(len(prompts) // 8, 1)][:8]
    alone = [ask(lab.open(setup), [prompt], lab.sizes.strict_tokens, 0.0)[1][0].token_ids for prompt in few]
    right = [wanted[prompts.index(prompt)] for prompt in few]
    same = sum(a == b for a, b in zip(alone, right, strict=True))
    print(f"{'none, alone':12s} T=0: {same}/{len(few)} equal", flush=True)
    yield "strict: none, one by one, equal answers", same / len(few), "", 1.0, ">="


def quant(lab: Lab) -> Iterator[Row]:
    """Plain decoding at batch 1 in other weight formats."""
    batch = lab.sizes.batches[0]
    for weights in FORMATS:
        setup = Setup(weights=weights, max_running=batch)
        try:
            own = lab.measure(setup, batch, 0.0)
        except Exception as error:  # one format that cannot be had says nothing about the next
            print(f"{weights:5s} missing: {error}", flush=True)
            yield f"{weights}, plain, batch {batch}, tok/s", None, "", None, ""
            continue
        print(f"{weights:5s} {own.tokens_per_second:8.1f} tok/s, {own.roofline:.0%} of the memory's speed", flush=True)
        yield f"{weights}, plain, batch {batch}, tok/s", own.tokens_per_second, "", None, ""
        yield f"{weights}, plain, batch {batch}, share of the memory's speed", own.roofline, "", None, ""
        lab.close(setup)


def context(lab: Lab) -> Iterator[Row]:
    """Time and memory with a very long prompt."""
    answer = 64
    length = min(lab.sizes.context, lab.config.max_positions) - answer
    setup = Setup(cache_tokens=length + answer + 1024, max_running=1)
    lab.close_all()  # the peak shall be this engine's own
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    llm = lab.open(setup)
    firsts, steps = [], []
    for turn in range(2):  # the first one captures and compiles
        prompt = random.Random(turn).choices(range(lab.config.vocab_size // 2), k=length)
        _, results = ask(llm, [prompt], answer, 0.0)
        firsts.append(results[0].stats.first_token_seconds)
        steps.append(step_seconds(results))
    share = lab.read_seconds("stored", length + answer / 2) / steps[-1]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    print(f"{length} tokens: first token {firsts}, step {steps[-1] * 1e3:.3f} ms ({share:.0%}), GiB {peak}", flush=True)
    yield f"{length} tokens of context: first token", firsts[-1], "s", None, ""
    yield f"{length} tokens of context: step", steps[-1] * 1e3, "ms", None, ""
    yield f"{length} tokens of context: share of the memory's speed", share, "", None, ""
    yield f"{length} tokens of context: peak memory", peak, "GB", None, ""
    lab.close(setup)


def load(lab: Lab) -> Iterator[Row]:
    """A process of its own from its start to its first token, as commands begin; files out of memory if the system
    obliges.
    """
    lab.close_all()
    forgotten = _forget_files(lab.standin)
    started = time.perf_counter()
    arguments = [sys.executable, "-c", START, str(lab.standin), lab.device]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    whole = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    loaded, first = map(float, done.stdout.split())
    cold = "cold" if forgotten else "files maybe in memory"
    print(f"loaded after {loaded:.1f} s, first token after {first:.1f} s, process {whole:.1f} s ({cold})", flush=True)
    yield f"load + first token, {cold}", first, "s", 20.0, "<="


def _forget_files(folder: Path) -> bool:
    """Ask the system to drop these files, and nobody else's, from its memory; whether it knows how to."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def idle(lab: Lab) -> Iterator[Row]:
    """How long the GPU waits between and within steps. Profiling makes launches slower: an upper bound."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to be idle")
    chain = contenders(lab, 0.0)["model"]
    for name, setup, batch in (("plain", PLAIN, 1), ("plain", PLAIN, 32), ("model", chain, 1)):
        llm = lab.open(setup)
        ask(llm, chats(llm.tokenizer, CHAT8, batch, 9000), lab.sizes.warm_up, 0.0)
        prompts = chats(llm.tokenizer, CHAT8, batch, 9500)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ask(llm, prompts, 40, 0.0)
            torch.cuda.synchronize()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events() or ()
            if event.device_type.name == "CUDA"
        )
        waiting, gaps = idle_shares(spans)
        print(f"{name}, batch {batch}: idle {gaps:.1%} altogether, {waiting:.1%} in gaps over {GAP:g} µs", flush=True)
        yield f"GPU waits for the host, {name}, batch {batch}", 100 * waiting, "%", 3.0, "<="
        yield f"GPU idle altogether, {name}, batch {batch}", 100 * gaps, "%", None, ""


def idle_shares(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Shares of time in long gaps, and in all gaps, of sorted (start, end); the first third, prompts, is left out."""
    first, last = spans[0][0], max(end for _, end in spans)
    begin = first + (last - first) / 3
    long = short = 0.0
    busy_until = None
    for start, end in spans:
        if start < begin:
            continue
        busy_until = start if busy_until is None else busy_until
        gap = max(start - busy_until, 0.0)
        short += gap
        long += gap if gap > GAP else 0.0
        busy_until = max(busy_until, end)
    whole = last - begin
    return long / whole, short / whole


TASKS = {"code": CODE8, "maths": MATHS8, "chat": CHAT8}
TRAINED_TREES = ("beam:nodes=31,width=6,depth=6", "beam:nodes=63,width=6,depth=6")
WARM_TOKENS = 24
WANTED = {"code": 3.0, "maths": 3.0, "chat": 2.3}


def trained(lab: Lab) -> Iterator[Row]:
    """Drafters trained for the stand-in, one prompt at a time, by task; the tree that does best counts."""
    speeds = {task: _one_at_a_time(lab, PLAIN, texts) for task, texts in TASKS.items()}
    for folder in lab.trained:
        best: dict[str, float] = {}
        for shape in TRAINED_TREES:
            for task, texts in TASKS.items():
                speed, length = _one_at_a_time(lab, Setup(str(folder), shape, max_running=1, whole=True), texts)
                ratio = speed / speeds[task][0]
                print(
                    f"{folder.name} {shape} {task}: {speed:.0f} tok/s, {ratio:.2f} x, {length:.2f} tok/step", flush=True
                )
                best[task] = max(ratio, best.get(task, 0.0))
        for task, ratio in best.items():
            yield f"{folder.name}, batch 1, {task}, / plain", ratio, "x", WANTED[task], ">="


def _one_at_a_time(lab: Lab, setup: Setup, texts: tuple[str, ...]) -> tuple[float, float]:
    """Tokens a second and tokens a step; all of them warm up first, and the prefix cache never helps."""
    llm = lab.open(setup)
    for prompt in chats(llm.tokenizer, texts, len(texts), 11000):  # lengths that are new compile and capture
        ask(llm, [prompt], WARM_TOKENS, 0.0)
    prompts = chats(llm.tokenizer, texts, len(texts), 12000)
    found = [ask(llm, [prompt], lab.sizes.tokens, 0.0) for prompt in prompts]
    stats = [results[0].stats for _, results in found]
    tokens = sum(own.num_tokens for own in stats)
    return tokens / sum(seconds for seconds, _ in found), tokens / sum(own.steps for own in stats)


def costs(lab: Lab) -> Iterator[Row]:
    """The table t(rows, context) that budgets are made by; it is kept, and every engine made later uses it."""
    table = lab.open(PLAIN).calibrate(lambda what: print(f"  {what}", flush=True))
    print(json.dumps(vars(table), default=str), flush=True)
    lab.close(PLAIN)  # it was made without the table
    yield from ()


def features(lab: Lab) -> Iterator[Row]:
    """What requests that ask for more cost: one of a batch, then all of it, over a batch that asks for nothing."""
    batch = lab.sizes.batches[-1] if len(lab.sizes.batches) < 3 else 32
    setup = Setup("ngram", max_running=batch)
    llm = lab.open(setup)
    plain = [SamplingParams(max_tokens=lab.sizes.tokens, ignore_eos=True, seed=1)] * batch
    wishes = {**WISHES, "grammar": {"grammar": json_grammar(SCHEMA)}} if find_spec("llguidance") else WISHES
    mixes = {f"one with {name}": [replace(plain[0], **wish), *plain[1:]] for name, wish in wishes.items()}  # type: ignore[arg-type]
    asked = {name: wishes[name] for name in ALL_OF_THEM if name in wishes}
    every = {f"all with {name}": [replace(own, **wish) for own in plain] for name, wish in asked.items()}  # type: ignore[arg-type]
    runs = {"nothing": plain} | mixes | every
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1 + lab.sizes.rounds):  # the first one shows which shapes are missed
        for number, (name, params) in enumerate(runs.items()):
            prompts = chats(llm.tokenizer, CHAT8, batch, 20000 + 1000 * turn + batch * number)
            seconds, results = ask_for(llm, prompts, params)
            if turn:
                speeds[name].append(sum(result.stats.num_tokens for result in results) / seconds)
            ComputeThread.shared().call(lambda: llm.engine.prepare(1.0))
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    for name, speed in medians.items():
        print(f"{batch} at a time, {name}: {speed:.0f} tok/s", flush=True)
    wanted = {f"all with {name}": share for name, share in ALL_OF_THEM.items()}
    for name in (*mixes, *every):
        yield f"batch {batch}, {name}, / none", medians[name] / medians["nothing"], "x", wanted.get(name, 0.95), ">="
    lab.close(setup)


def first(lab: Lab) -> Iterator[Row]:
    """Time to the first token of one request, by the length of its prompt; no length comes twice."""
    longest = min(max(FIRST_LENGTHS), lab.config.max_positions - 8)
    setup = Setup(max_running=1, cache_tokens=2 * longest + 1024)
    llm, generator, words = lab.open(setup), random.Random(5), range(lab.config.vocab_size // 2)
    for length in (own for own in FIRST_LENGTHS if own <= longest):
        times = []
        for turn in range(4 * lab.sizes.rounds):
            prompt = generator.choices(words, k=length - 3 * turn)
            times.append(ask(llm, [prompt], 1, 0.0)[1][0].stats.first_token_seconds)
        half, most = statistics.median(times), max(times)
        print(f"{length} tokens: first token {half * 1e3:.1f} ms, at most {most * 1e3:.1f}", flush=True)
        yield f"first token, {length} tokens", half * 1e3, "ms", 195 if length == 8000 else None, "<="
        yield f"first token, {length} tokens, slowest / median", most / half, "x", 1.5, "<="
    lab.close(setup)


SECTIONS: Mapping[str, Callable[[Lab], Iterator[Row]]] = {
    "load": load,
    "costs": costs,
    "speed": speed,
    "traffic": traffic,
    "features": features,
    "first": first,
    "tree": tree,
    "idle": idle,
    "strict": strict,
    "quant": quant,
    "context": context,
    "trained": trained,
}
