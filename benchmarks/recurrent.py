"""What recurrent layers cost: plain steps, trees and prompts of published shapes with random weights, in torch.

    python benchmarks/recurrent.py --threads 1 --shapes lfm2-350m mamba2-130m

A step is the forward and the commit of its path.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from common import interleaved, report
from draftwood.cache.kv import stage_trees
from draftwood.model.config import ModelConfig
from draftwood.model.names import count_parameters, expected_shape
from draftwood.model.runner import ModelRunner
from draftwood.model.transformer import Transformer
from draftwood.protocols import Span
from draftwood.states import KeptPath
from draftwood.tree import TokenTree

PROMPT, PAGE, VOCABULARY = 512, 64, 8000
TREES = (1, 8, 32)  # nodes, two behind each
_MOSTLY = ["linear_attention"] * 3 + ["full_attention"]
SHAPES: dict[str, dict[str, object]] = {
    "lfm2-350m": {
        "model_type": "lfm2", "hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "mamba2-130m": {
        "model_type": "mamba2", "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64,
        "state_size": 128, "n_groups": 1,
    },
    "granite-4-350m-h": {
        "model_type": "granitemoehybrid", "hidden_size": 768, "intermediate_size": 2048, "num_local_experts": 0,
        "shared_intermediate_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 12,
        "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128,
        "layer_types": [*["mamba"] * 7, "attention"] * 4,
    },
    "qwen3.5-small": {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
        "layer_types": _MOSTLY * 3,
    },
}  # fmt: skip


class RandomWeights:
    """Whatever tensor is asked for."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.name = config, config.family

    def has(self, name: str) -> bool:
        return expected_shape(name, self.config) is not None

    def tensor(self, name: str) -> Tensor:
        shape = expected_shape(name, self.config)
        assert shape is not None
        return torch.randn(shape) * (0.02 if len(shape) > 1 else 0.3)

    matrix = tensor

    def forget(self) -> None:
        pass


def runs_of(name: str) -> dict[str, Callable[[], float]]:
    """Milliseconds of a prompt, and of steps of trees of several sizes behind it."""
    usual = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    config = ModelConfig.from_hf({**usual, **SHAPES[name]})
    model = Transformer(RandomWeights(config), torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    runner = ModelRunner(model, PROMPT // PAGE + 2, PAGE, num_states=2)
    tables, text = runner.cache.tables, [Span(0, [i % 100 for i in range(PROMPT)], 0, PROMPT)]
    tables.open(0, [])
    tables.reserve(0, PROMPT + max(TREES))
    prompt = runner.cache.stage_text(text)
    view = SimpleNamespace(
        lengths=torch.tensor([PROMPT]),
        block_table=runner.cache.block_table(text),
        states=runner.cache.state_places(text, torch.device("cpu")),
        adapters=None,
        source_lengths=None,
        turn_shifts=None,
    )

    def step(nodes: int) -> None:
        tree = TokenTree.of_points([(list(range(nodes)), [-1, *(i // 2 for i in range(nodes - 1))])])
        batch = stage_trees(view, tree, PAGE, config.max_positions, chain=nodes == 1)  # type: ignore[arg-type]
        staged = model.forward(batch, runner.cache.memory).staged
        path = KeptPath(view.block_table, view.lengths, tree.local[:1, None], torch.zeros(1, dtype=torch.int64))
        runner.cache.commit(replace(path, staged=staged))

    size = f"{name}, {count_parameters(config) / 1e6:.0f}M"
    runs = {f"{size}: prompt of {PROMPT}": _timed(lambda: model.forward(prompt, runner.cache.memory))}
    return runs | {f"{size}: step of {nodes} rows": _timed(partial(step, nodes)) for nodes in TREES}


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    def milliseconds() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            run()
        return 1000 * (time.perf_counter() - start)

    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: dict[str, float] = {}
    for name in arguments.shapes:
        found |= interleaved(runs_of(name), arguments.rounds)
    report([(what, value, "ms", None, "<=") for what, value in found.items()], "recurrent")


if __name__ == "__main__":
    main()
