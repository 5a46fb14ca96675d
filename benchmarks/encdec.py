"""What drafts from the source are worth: an encoder-decoder translates plainly and with lookups in the source.

    python benchmarks/convert_marian.py path/to/opus-mt-en-fr marian-en-fr
    python benchmarks/encdec.py marian-en-fr

Prints tokens a step, acceptance and seconds of each drafter, sentence by sentence alone and all in one batch, and
whether all say the same.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from draftwood import LLM, EngineConfig, Result, SamplingParams

PROSE = (
    "The cat sat on the mat and looked at the rain.",
    "Yesterday the old bridge across the river was closed, and yesterday the old road was closed too.",
    "When she opened the letter, she understood at once why nobody had written to her for so long.",
    "Speculative decoding keeps the distribution of the model unchanged.",
)
NAMES = (
    "Microsoft Windows Server 2019 and Red Hat Enterprise Linux 8.4 are supported on Intel Xeon Gold 6230 and AMD EPYC "
    "7742 processors.",
    "The flights LH 4567, AF 1234 and BA 0987 to Frankfurt, Paris Charles de Gaulle and London Heathrow are cancelled.",
    "Contact Maria Gonzalez-Hernandez (maria.gonzalez@example.com) or Kristoffer Lindqvist (k.lindqvist@example.org).",
    "Set PYTHONUNBUFFERED=1 and OMP_NUM_THREADS=4 before you start the server on http://localhost:8000/v1/completions.",
)
DRAFTERS = ("none", "ngram", "ngram:shortest=1", "suffix", "combined:suffix+ngram")


def answered(llm: LLM, texts: tuple[str, ...], params: SamplingParams, *, alone: bool) -> tuple[list[Result], float]:
    """Translations, and the seconds they took."""
    start = time.perf_counter()
    parts = [(text,) for text in texts] if alone else [texts]
    results = [result for part in parts for result in llm.generate(params=params, encoder_input=list(part))]
    return results, time.perf_counter() - start


def measure(folder: Path, threads: int, tokens: int, repeats: int) -> None:
    """Print a line for each drafter, kind of text and way to ask."""
    params, plain, salts = SamplingParams(max_tokens=tokens), {}, 0
    print("drafter                 texts  asked   tok/step  accepted  tokens  median s  same")
    for drafter in DRAFTERS:
        config = EngineConfig(threads=threads, cache_tokens=1 << 14, device="cpu", dtype="float32")
        with LLM(folder, drafter=drafter, config=config) as llm:
            answered(llm, PROSE, params, alone=False)  # warm
            for kind, texts in (("prose", PROSE), ("names", NAMES)):
                for alone in (True, False):
                    runs = []
                    for _ in range(repeats):  # each reads its sources anew
                        salts += 1
                        salted = SamplingParams(max_tokens=tokens, cache_salt=str(salts))
                        runs.append(answered(llm, texts, salted, alone=alone))
                    results, seconds = sorted(runs, key=lambda run: run[1])[len(runs) // 2]
                    said = [result.token_ids for result in results]
                    same = said == plain.setdefault((kind, alone), said)
                    stats = [result.stats for result in results]
                    total, drafted = sum(s.num_tokens for s in stats), sum(s.drafted for s in stats)
                    accepted = sum(s.accepted for s in stats) / max(drafted, 1)
                    steps = total / sum(s.steps for s in stats)
                    way = "alone" if alone else "batch"
                    print(
                        f"{drafter:23} {kind}  {way}  {steps:9.2f}  {accepted:8.0%}  {total:6}  {seconds:8.3f}  {same}"
                    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    measure(arguments.folder, arguments.threads, arguments.tokens, arguments.repeats)
