"""A decoder of transformers as a model: its own modules, with our rows, pages and masks (`universal_rows.py`).

How the modules are to be asked is found out when they are loaded: each way is held against the model's own forward,
and a model that none of them computes exactly is refused. Needs the extra `draftwood[universal]`.
"""

from __future__ import annotations

import inspect
import logging as python_logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from draftwood.batch import ForwardBatch, ForwardOutput, Pages, Source
from draftwood.cache.kv import KVCache
from draftwood.errors import CheckpointError, InvalidRequest
from draftwood.model.packing import Arena
from draftwood.model.self_check import LENGTHS, NODES, PAGE, SEQUENCES, worst_difference
from draftwood.model.universal_attention import CALLED, GATHERED
from draftwood.model.universal_experts import EXPERTS
from draftwood.model.universal_folder import UniversalCheckpoint, UniversalConfig, hf_config
from draftwood.model.universal_linear import pack_products
from draftwood.model.universal_ranks import split
from draftwood.model.universal_rows import Layout, PagesCache, RowsCache, Step, running
from draftwood.model.weights import FORMATS
from draftwood.ops.native import Kernels, kernels

log = python_logging.getLogger(__name__)

TOLERANCE = 2e-3  # of the logits' spread; wrong masks, slots and positions differ by more than a tenth of it


@dataclass(frozen=True)
class Route:
    """A way to ask a model's modules."""

    says: str
    attention: str
    cache: type[RowsCache]
    gives_mask: bool  # of as many keys as there are rows: a law of it must not be asked about others


ROUTES = (
    Route("layers ask for attention", CALLED, RowsCache, False),
    Route("layers ask for attention, and the model for a mask", CALLED, RowsCache, True),
    Route("layers attend by themselves over gathered keys", GATHERED, PagesCache, True),
)


class UniversalModel:
    """Modules of transformers that run our rows. On a GPU nothing looks at values but layers that attend by themselves:
    steps with those cannot be captured and run eagerly.
    """

    implementation = "transformers-2"
    strict = False  # torch's products choose their order of summation by the number of rows

    def __init__(self, checkpoint: UniversalCheckpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device, self.weights = dtype, device, FORMATS["stored"]
        self._modules = loaded(AutoModelForCausalLM, checkpoint, dtype, device)
        _set_experts(self._modules)
        accepted = inspect.signature(self._modules.forward).parameters
        self._keeps, self._takes_positions = "logits_to_keep" in accepted, "position_ids" in accepted
        self._whole: dict[tuple[int, ...], Tensor] = {}  # texts and their logits, before anything was split
        self.config, self.route, self._layout = self._settled(checkpoint)
        if checkpoint.ranks.size > 1:
            split(self._modules, checkpoint.ranks)
            self.config, self.route, self._layout = self._settled(checkpoint)
        self._whole.clear()
        set_attention(self._modules, self.route.attention)
        alone = device.type == "cpu" and dtype == torch.float32 and checkpoint.ranks.size == 1
        library = kernels() if alone else None
        self._packed = None if library is None else self._pack(checkpoint, library)

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        return bytes_of(self._modules) + (0 if self._packed is None else self._packed.num_bytes)

    def _pack(self, checkpoint: UniversalCheckpoint, library: Kernels) -> Arena | None:
        """Products on our own kernels, if the modules give the same with them; else they are read again."""
        trial = torch.arange(max(LENGTHS))[None] % checkpoint.config.vocab_size

        def logits() -> Tensor:
            with attending(self._modules, "eager", self.route.attention), torch.inference_mode():
                return self._modules(trial, use_cache=False).logits

        wanted = logits()
        try:
            arena = pack_products(self._modules, checkpoint, library)
            off = float((logits() - wanted).abs().max() / wanted.std())
            reason = None if off <= TOLERANCE else f"logits differ by {off:.1g} of their spread"
        except Exception as error:  # whatever modules do that look into their products
            arena, reason = None, said(error)
        if reason is None:
            return arena
        log.warning("%s: its products stay torch's, which are slower: %s.", checkpoint.name, reason)
        self._modules = loaded(AutoModelForCausalLM, checkpoint, self.dtype, self.device)
        _set_experts(self._modules)
        self.config, self.route, self._layout = self._settled(checkpoint)
        set_attention(self._modules, self.route.attention)
        return None

    def forward(self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset()) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`."""
        if needs:
            raise InvalidRequest("Models that run on transformers' own modules give no features of their layers.")
        return ForwardOutput(self._run(Step(batch, cache, self._layout), self.route), {})

    def _run(self, step: Step, route: Route) -> Tensor:
        batch = step.batch
        asked: dict[str, Any] = {"input_ids": batch.tokens[None], "use_cache": True}
        asked["past_key_values"] = route.cache(step)
        if self._takes_positions:
            asked["position_ids"] = batch.positions[None]
        if route.gives_mask:
            keys = sum(step.num_keys) if route.cache is PagesCache else len(batch.tokens)
            asked["attention_mask"] = torch.ones(1, keys, dtype=torch.int64, device=self.device)
        if self._keeps:
            asked["logits_to_keep"] = batch.logit_rows
        with running(step), torch.inference_mode():
            logits = self._modules(**asked).logits[0]
        return logits if self._keeps else logits[batch.logit_rows]

    def _settled(self, checkpoint: UniversalCheckpoint) -> tuple[UniversalConfig, Route, Layout]:
        """The first way that computes what the model itself does; a refusal where none does."""
        reasons = []
        for route in ROUTES if self.device.type == "cpu" else (ROUTES[0], ROUTES[-1]):
            set_attention(self._modules, route.attention)
            try:
                _require_visible_windows(route, checkpoint)
                layout = self._probed(route, checkpoint.config)
                config = replace(checkpoint.config, planes=layout.total, plane=layout.plane)
                worst = self._checked(config, route, layout)
            except Exception as error:  # whatever modules that were not written for this do
                reasons.append(f"{route.says}: {said(error)}")
                continue
            if worst <= TOLERANCE:
                return config, route, layout
            reasons.append(f"{route.says}: logits differ by {worst:.1g} of their spread")
        raise CheckpointError(
            f"{checkpoint.name} ({checkpoint.config.model_type}) cannot be run: with our pages and masks"
            f"{f', over {checkpoint.ranks.size} ranks' if checkpoint.ranks.size > 1 else ''}, "
            "transformers' modules do not compute what they compute by themselves, so answers would be wrong "
            f"({'; '.join(reasons)}). "
            "Use another model, or a family that our decoder knows (docs/models.md)."
        )

    def _probed(self, route: Route, config: UniversalConfig) -> Layout:
        """Shapes of keys and values of each call of attention, from one row that is not kept."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        one, offsets = zero + 1, torch.arange(2, device=self.device)
        batch = ForwardBatch(zero, zero, zero, one, zero[None], offsets, one, one, zero[None], zero)
        step = Step(batch, None, None, longest=config.max_positions)
        known = self._run(step, route).shape[-1]
        if known != config.vocab_size:
            raise CheckpointError(f"it gives logits of {known} tokens, and its configuration says {config.vocab_size}")
        if not step.found:
            raise CheckpointError("its layers do neither ask for attention nor for a cache")
        return Layout.of(tuple(step.found))

    def _checked(self, config: UniversalConfig, route: Route, layout: Layout) -> float:
        pages = SEQUENCES * -(-(max(LENGTHS) + NODES) // PAGE)
        cache = KVCache(config, pages, PAGE, self.dtype, self.device)

        def forward(batch: ForwardBatch, memory: Pages) -> ForwardOutput:
            return ForwardOutput(self._run(Step(batch, memory, layout), route), {})

        def reference(tokens: Tensor, _: Source | None) -> Tensor:
            text = tuple(tokens.tolist())
            if text not in self._whole:
                with attending(self._modules, "eager", route.attention), torch.inference_mode():
                    self._whole[text] = self._modules(tokens[None], use_cache=False).logits[0]
            return self._whole[text]

        with self.device:  # where the trial's tensors are made
            return worst_difference(forward, reference, cache, config.vocab_size)


def loaded(kind: Any, checkpoint: UniversalCheckpoint, dtype: torch.dtype, device: torch.device) -> Any:
    """The modules with their weights, ready to compute; only safetensors are read, and no code of the folder."""
    config = hf_config(checkpoint.stated)
    config._experts_implementation = "eager"  # expert by expert: a row's sums do not depend on other rows' experts
    try:
        with _quiet():
            found: Any = kind.from_pretrained(
                checkpoint.folder, config=config, dtype=dtype, attn_implementation="eager", trust_remote_code=False,
                use_safetensors=True, local_files_only=True, output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # what it says depends on the family
        raise CheckpointError(f"{checkpoint.name} cannot be loaded by transformers: {said(error)}.") from error
    modules, report = found
    lacking = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in report[kind])
    if lacking:
        raise CheckpointError(
            f"{checkpoint.name} has no {', '.join(lacking[:3])} that fits its configuration: the files are incomplete "
            "or of another architecture. Download the model again."
        )
    return modules.eval().requires_grad_(False).to(device)


def bytes_of(modules: nn.Module) -> int:
    """Memory of all weights."""
    tensors = [*modules.parameters(), *modules.buffers()]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a progress bar of transformers'."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _require_visible_windows(route: Route, checkpoint: UniversalCheckpoint) -> None:
    """Layers that attend by themselves may have windows of their own, longer than the texts they are checked with."""
    windows = [key for key, value in checkpoint.windows.items() if value]
    if windows and route.cache is PagesCache:
        raise CheckpointError(f"its {windows[0]} cannot be seen in them")


def said(error: Exception) -> str:
    """Its kind and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200].rstrip('. ')}" if lines else type(error).__name__


def set_attention(modules: nn.Module, name: str) -> None:
    """Let all parts attend in this way."""
    for part in modules.modules():
        config = vars(part).get("config")
        if config is not None:
            config._attn_implementation = name


def _set_experts(modules: nn.Module) -> None:
    """Let mixtures ask us how their experts are run; expert by expert where the host may look."""
    for part in modules.modules():
        config = vars(part).get("config")
        if config is not None:
            config._experts_implementation = EXPERTS


@contextmanager
def attending(modules: nn.Module, name: str, before: str) -> Iterator[None]:
    """Attend in another way for a while."""
    set_attention(modules, name)
    try:
        yield
    finally:
        set_attention(modules, before)
