"""A quantised file as people download it, on a CPU: memory, speed beside llama.cpp's, wide steps, drafts from text.

python benchmarks/cpu_formats.py FILE.gguf [--data humaneval.jsonl] [--peers .venv-peers] [--threads 2] [--rounds 5]

Peaks are those of processes of their own (VmHWM): our `LLM` with 2,048 tokens of cache, and `draftwood generate` of
the embedded model as a user runs it. llama.cpp answers the same token ids from the same file, in turn with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import cpu_prompts
from common import ROOT, interleaved, report
from cpu_peers import PLAIN
from cpu_peers.ours import Ours
from cpu_peers.processes import Environments, Failure, Key, Process
from draftwood import LLM, EngineConfig, SamplingParams
from draftwood.model.tokenizer import Tokenizer

CONTEXT, TOKENS, WIDE = 200, 48, 4
PEAK = """
import sys
from draftwood import LLM, EngineConfig, SamplingParams
llm = LLM(sys.argv[1], config=EngineConfig(cache_tokens=2048, threads=int(sys.argv[2])))
llm.generate("def add(a, b):", SamplingParams(max_tokens=32))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def peak_of_llm(file: Path, threads: int) -> float:
    """Megabytes (1,000,000 bytes, as files are counted)."""
    command = [sys.executable, "-c", PEAK, str(file), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024 / 1e6


def peak_of_command(threads: int) -> float:
    """Of `draftwood generate` with everything as it comes."""
    command = [sys.executable, "-m", "draftwood", "generate", "Why is the sky blue?", "-n", "32"]
    child = subprocess.Popen([*command, "--threads", str(threads)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit("draftwood generate failed")
    return used.ru_maxrss * 1024 / 1e6


class Text(Ours):
    """A file with a drafter."""

    def __init__(self, file: Path, drafter: str, threads: int) -> None:
        self.version, self.writing = "", None
        self._llm = LLM(file, drafter=drafter, config=EngineConfig(threads=threads, cache_tokens=2048))
        if drafter != "none":
            self._llm.calibrate()

    def speed(self, prompt: Sequence[int], tokens: int) -> float:
        """Tokens a second, the prompt's reading included."""
        start = time.perf_counter()
        self._llm.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))
        return tokens / (time.perf_counter() - start)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer


def llama_cpp(file: Path, peers: Path, threads: int) -> Callable[[Sequence[int], int], float] | str:
    """What answers with llama.cpp, or why it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        places = Environments(Path(folder), threads)
        try:
            Environments(peers, threads).python("llamacpp")
            for part in ("bin", "lib", "pyvenv.cfg"):  # an environment is known by what lies beside its programs
                (Path(folder) / part).symlink_to((peers / part).resolve())
            places.models.mkdir()
            (places.models / "file.gguf").symlink_to(file.resolve())
            process = Process(Key("llamacpp", "file", PLAIN), places)
        except Failure as failure:
            return str(failure)

    def speed(prompt: Sequence[int], tokens: int) -> float:
        return tokens / process.ask("generate", prompt=list(prompt), max_tokens=tokens)["seconds"]

    return speed


def prompts_of(data: Path | None, tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """HumanEval's where they are given, else our own; a text as a chat of one turn, where the model knows chats."""
    texts = list(cpu_prompts.BUILT_IN)[-2:]
    if data is not None:
        lines = [line for line in data.read_text().splitlines() if line.strip()]
        texts = [json.loads(line)["turns"][0] for line in lines[:: max(1, len(lines) // count)][:count]]
    if not tokenizer.has_chat_template:
        return [tokenizer.encode(text) for text in texts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.encode(tokenizer.render_chat(chat), special=False) for chat in chats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", type=Path, help="HumanEval's prompts, as lines of {turns}")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=160, help="of an answer with drafts")
    args = parser.parse_args()

    small, large = peak_of_command(args.threads), peak_of_llm(args.file, args.threads)
    plain, drafting = (Text(args.file, name, args.threads) for name in ("none", "ngram"))
    prompts = prompts_of(args.data, plain.tokenizer, args.prompts)
    speeds = {"ours": lambda: plain.speed(prompts[0], TOKENS)}
    peer = llama_cpp(args.file, args.peers, args.threads)
    if callable(peer):
        speeds["llama.cpp"] = lambda: peer(prompts[0], TOKENS)
    else:
        print(f"no llama.cpp: {peer}", file=sys.stderr)
    alone = interleaved(speeds, args.rounds)

    text = (prompts[0] * (1 + CONTEXT // len(prompts[0])))[: CONTEXT + WIDE]
    steps = {rows: min(plain.steps(text[:CONTEXT], text[CONTEXT : CONTEXT + rows], 25)) for rows in (1, WIDE)}
    ratios = []
    for prompt in prompts:
        both = {"plain": plain, "ngram": drafting}
        found = interleaved(
            {name: lambda p=prompt, one=one: one.speed(p, args.tokens) for name, one in both.items()}, 3
        )
        ratios.append(found["ngram"] / found["plain"])
    beside = None if len(alone) < 2 else alone["ours"] / alone["llama.cpp"]
    mean = len(ratios) / sum(1 / ratio for ratio in ratios)
    report(
        [
            ("peak memory of draftwood generate, smollm2", small, "MB", 400.0, "<="),
            (f"peak memory of LLM, {args.file.name}", large, "MB", 700.0, "<="),
            ("plain decoding", alone["ours"], "/s", None, ""),
            ("plain decoding over llama.cpp's", beside, "x", 1.0, ">="),
            (f"step of {WIDE} rows over one row", steps[WIDE] / steps[1], "x", 1.5, "<="),
            (f"ngram over plain, {'HumanEval' if args.data else 'two prompts of ours'}", mean, "x", 1.25, ">="),
        ],
        "cpu-formats",
        {"ratios": [round(ratio, 3) for ratio in ratios], "seconds": steps, "speeds": alone},
    )


if __name__ == "__main__":
    main()
