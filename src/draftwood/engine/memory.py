"""What an engine will need of a device's memory, known before anything is loaded.

Too little memory is then a sentence that says what to lower, not a stack trace from the middle of a download.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from draftwood.cache.recurrent import state_bytes
from draftwood.config import SPARE_STATES, EngineConfig
from draftwood.errors import InvalidRequest
from draftwood.model.config import ModelConfig
from draftwood.model.names import parameters_by_kind
from draftwood.model.universal_folder import UniversalConfig
from draftwood.model.weights import FORMATS, GROUP, ON_ACCELERATORS, Storage
from draftwood.ops.packed import SCALE_BYTES, Packing

SMALLER_FORMATS = ("int8", "fp8", "int4")  # what may be recommended, largest first
BYTES = {  # of one weight with its share of scales and minima, by the storage's name
    "FLOAT32": 4.0,
    "BFLOAT16": 2.0,
    "FLOAT8": 1.0,
    "INT8": 1 + 2 / GROUP,
    "INT4": 0.5 + 4 / GROUP,
}
SPARE_PAGES = 1  # that a cache has beyond what it is asked for
FIXED = 1 << 30  # graphs, the libraries' own workspaces, and what an allocator cannot use
LOGIT_COPIES = 4  # float32 rows over the vocabulary that a step holds at a time, besides the logits themselves
LAYER_COPIES = 4  # of a layer's widest rows
WITHOUT_KEYS = 1 << 20  # tokens of a model without attention, which take no memory
CACHE_SHARE = 0.9  # of what the rest leaves
STATE_SHARE = 0.25  # of a GPU's free memory, for states of recurrent layers
STATE_MEMORY = 2 << 30  # the same on a CPU


@dataclass(frozen=True)
class MemoryPlan:
    """What needs how many bytes, and how many there are."""

    weights: int
    draft_weights: int
    cache: int  # keys and values of the target and of the draft model
    graphs: int  # graphs and activations
    free: int
    total: int
    token: int = 0  # bytes of one token in the cache
    page_size: int = 1
    formats: Mapping[str, int] = field(default_factory=dict)  # the weights in other formats
    states: int = 0  # of recurrent layers, for every sequence that may run

    @property
    def needed(self) -> int:
        """Everything together."""
        return self.weights + self.draft_weights + self.cache + self.states + self.graphs

    @property
    def fits(self) -> bool:
        """Whether there is room for everything."""
        return self.needed <= self.free

    @property
    def cache_tokens(self) -> int:
        """Tokens the planned cache holds."""
        return self.cache // self.token - SPARE_PAGES * self.page_size if self.token else 0


def weight_bytes(config: ModelConfig, weights: str, dtype: torch.dtype) -> int:
    """Memory of a model's weights in a format; `stored` and whatever is not a matrix have the type computed in.

    So has the token embedding, of which a step reads a few rows only. It is the head itself where both are the same.
    """
    if isinstance(config, UniversalConfig):
        return config.parameters * dtype.itemsize
    form = {**FORMATS, **ON_ACCELERATORS}[weights]
    layers, _, vectors = parameters_by_kind(config)
    head = config.vocab_size * config.hidden_size
    shared = config.tied_head and _bytes(form.head, dtype) == dtype.itemsize
    plain = vectors + (0 if shared else head)
    return int(layers * _bytes(form.layers, dtype) + head * _bytes(form.head, dtype)) + plain * dtype.itemsize


def _bytes(storage: Storage | None, dtype: torch.dtype) -> float:
    return dtype.itemsize if storage is None else BYTES.get(storage.name, float(dtype.itemsize))


def away_bytes(model: ModelConfig, config: EngineConfig, weights: str) -> tuple[int, int]:
    """Of the layers that are not on the device, in a format; and of one layer, of which two have places there."""
    layers, _, _ = parameters_by_kind(model)
    dtype, formats = config.torch_dtype(), {**FORMATS, **ON_ACCELERATORS}
    stored = layers * _bytes(formats[config.weights].layers, dtype)
    share = config.offload if config.offload <= 1 else min(1.0, config.offload / stored)
    all_layers = layers * _bytes(formats[weights].layers, dtype)
    return int(share * all_layers), int(all_layers / model.num_layers)


def token_bytes(config: ModelConfig, dtype: torch.dtype, packing: Packing | None = None) -> int:
    """Keys and values of one token."""
    layers, heads, dim = config.cache_shape
    return 2 * layers * heads * (dim * dtype.itemsize if packing is None else dim + SCALE_BYTES)


def activation_bytes(config: ModelConfig, rows: int, dtype: torch.dtype) -> int:
    """What a step of so many rows holds at a time."""
    widest = 2 * config.intermediate_size + config.hidden_size
    return rows * (config.vocab_size * (dtype.itemsize + 4 * LOGIT_COPIES) + LAYER_COPIES * widest * dtype.itemsize)


def plan_memory(
    target: ModelConfig,
    draft: ModelConfig | None,
    config: EngineConfig,
    free: int,
    total: int,
    copy: str | None = None,
) -> MemoryPlan:
    """The plan for a target, a draft model if there is one, and a device with `free` of `total` bytes.

    `copy`: the format of a second copy of the target's weights, if its drafts have one.
    """
    dtype = config.torch_dtype()
    models = [target] if draft is None else [target, draft]
    token = sum(token_bytes(model, dtype, config.cache_packing()) for model in models)
    away, layer = away_bytes(target, config, config.weights)
    if draft is target:  # it shares what is on the device
        draft_weights, _ = away_bytes(target, config, SMALLER_FORMATS[-1])
    else:
        draft_weights = 0 if draft is None else weight_bytes(draft, config.weights, dtype)
    return MemoryPlan(
        weights=weight_bytes(target, config.weights, dtype) - away + (2 * layer if away else 0),
        draft_weights=draft_weights + (0 if copy is None else weight_bytes(target, copy, dtype)),
        cache=(config.num_pages + SPARE_PAGES) * config.page_size * token,
        graphs=FIXED + sum(activation_bytes(model, config.max_rows, dtype) for model in models),
        free=free,
        total=total,
        token=token,
        page_size=config.page_size,
        formats={name: weight_bytes(target, name, dtype) for name in SMALLER_FORMATS},
        states=(config.num_states + 1) * sum(state_bytes(model.recurrent, dtype) for model in models),
    )


def device_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on a CUDA device, and all it has."""
    return torch.cuda.mem_get_info(device)


def automatic_cache_tokens(
    target: ModelConfig,
    draft: ModelConfig | None,
    config: EngineConfig,
    free: int,
    total: int,
    copy: str | None = None,
) -> int:
    """Tokens that fit in most of what is left: whole pages, and no more than all requests could ever use."""
    plan = replace(plan_memory(target, draft, config, free, total, copy), cache=0)
    size = config.page_size
    fitting = _room(plan)
    if fitting < size:
        smallest = replace(plan, cache=(1 + SPARE_PAGES) * size * plan.token)
        raise InvalidRequest(_explanation(smallest, "There is no room for a cache"))
    longest = -(-(target.max_positions + config.max_rows) // size) * size  # a full context and the largest tree
    return min(fitting, config.max_running * longest if plan.token else WITHOUT_KEYS)


def with_states_for(
    target: ModelConfig, draft: ModelConfig | None, config: EngineConfig, free: int | None
) -> EngineConfig:
    """The same with no more sequences at a time than have their states in a share of a GPU's free memory, or, without
    a GPU, in a fixed amount; where the target or the draft model has states.
    """
    models = [target] if draft is None else [target, draft]
    state = sum(state_bytes(model.recurrent, config.torch_dtype()) for model in models)
    memory = STATE_MEMORY if free is None else int(free * STATE_SHARE)
    fitting = memory // max(state, 1) - SPARE_STATES - 1
    return replace(config, max_running=min(config.max_running, max(fitting, 1))) if state else config


def _room(plan: MemoryPlan) -> int:
    """Tokens of cache, in whole pages, that fit in most of what everything else leaves."""
    left = max(plan.free - plan.weights - plan.draft_weights - plan.states - plan.graphs, 0)
    pages = int(left * CACHE_SHARE) // max(plan.token * plan.page_size, 1)
    return max(pages - SPARE_PAGES, 0) * plan.page_size


def check(plan: MemoryPlan) -> None:
    """Refuse a plan that does not fit, and say what would."""
    if not plan.fits:
        raise InvalidRequest(_explanation(plan, "This does not fit into the device's memory"))


def explain_out_of_memory(error: torch.OutOfMemoryError, plan: MemoryPlan) -> InvalidRequest:
    """The same words for an allocation that failed although the plan had room for it.

    `plan.free` should be what was free before anything was loaded.
    """
    lines = str(error).strip().splitlines()
    reason = lines[0].split(". ")[0].rstrip(".") if lines else type(error).__name__
    explained = InvalidRequest(_explanation(plan, f"The device's memory has run out ({reason})"))
    explained.__cause__ = error
    return explained


def _explanation(plan: MemoryPlan, what: str) -> str:
    parts = [("weights", plan.weights), ("draft model", plan.draft_weights)]
    parts += [(f"cache of {plan.cache_tokens} tokens" if plan.token else "cache", plan.cache)]
    parts += [("states of recurrent layers", plan.states), ("graphs and activations", plan.graphs)]
    needs = " + ".join(f"{name} {_gib(size)}" for name, size in parts if size)
    taken = plan.total - plan.free
    others = f"; {_gib(taken)} are taken already, by this process or another" if taken > plan.total // 10 else ""
    there = f"and {_gib(plan.free)} of {_gib(plan.total)} are free{others}"
    return f"{what}: {needs} = {_gib(plan.needed)}, {there}. {_advice(plan)}"


def _advice(plan: MemoryPlan) -> str:
    """What to lower: changes that are enough by themselves if there are any, else everything that helps."""
    enough = [way for way in (_enough_cache(plan), _enough_weights(plan)) if way]
    helpful = ["lower max_rows", *(["lower max_running"] if plan.states else [])]
    if plan.draft_weights:
        helpful.insert(0, "take a smaller draft model or a drafter that needs none, such as ngram")
    if enough:
        return f"To make it fit: {'; or '.join(enough)}. It also helps to {', or '.join(helpful)}."
    smallest = list(_smaller_weights(plan).items())[-1:]
    helpful = [f"store the weights as {name} ({_gib(size)})" for name, size in smallest] + helpful
    return f"No single change is enough; several together may be: lower cache_tokens, {', '.join(helpful)}."


def _enough_cache(plan: MemoryPlan) -> str | None:
    if not plan.token:
        return None
    # Running out of memory although everything should fit: halve what there is a choice about.
    tokens = min(_room(plan), plan.cache_tokens // 2 // plan.page_size * plan.page_size) if plan.fits else _room(plan)
    return f"cache_tokens={tokens}" if tokens else None


def _enough_weights(plan: MemoryPlan) -> str | None:
    """The largest format that is enough: it loses least."""
    enough = ((n, size) for n, size in _smaller_weights(plan).items() if plan.needed - plan.weights + size <= plan.free)
    return next((f"weights='{name}' ({_gib(size)})" for name, size in enough), None)


def _smaller_weights(plan: MemoryPlan) -> dict[str, int]:
    return {name: size for name, size in plan.formats.items() if size < plan.weights}


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
