"""A model with its own paged cache: the target, and any draft model; the same class with other weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from draftwood.batch import ForwardBatch, ForwardOutput, GivenRows, Pages
from draftwood.cache.kv import STATES, KVCache
from draftwood.errors import InvalidRequest
from draftwood.model import native
from draftwood.model.checkpoint import Checkpoint
from draftwood.model.config import ModelConfig
from draftwood.model.gpu_limits import refuses as gpu_refuses
from draftwood.model.isa import avoid_broken_amx
from draftwood.model.lora import Adapter
from draftwood.model.native import NativeTransformer, Progress
from draftwood.model.native_streamed import StreamedNative
from draftwood.model.sharding import ranks_of
from draftwood.model.spec import NONE, Sublayers
from draftwood.model.stages import StageCheckpoint, StageModel
from draftwood.model.transformer import Transformer
from draftwood.model.universal_folder import UniversalCheckpoint, UniversalConfig, require_supported
from draftwood.model.weights import FORMATS, WeightFormat
from draftwood.ops.native import kernels, why_missing
from draftwood.ops.packed import Packing

log = logging.getLogger(__name__)
RUN_BY_TRANSFORMERS = "transformers' own modules with our pages and masks, checked against themselves when loaded"


class Model(Protocol):
    """Weights that can run a forward."""

    dtype: torch.dtype
    device: torch.device
    weights: WeightFormat
    implementation: str  # changes whenever the code that computes does

    @property
    def config(self) -> ModelConfig:
        """What it looks like."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        ...

    @property
    def strict(self) -> bool:
        """Whether a row's logits are the same, bit for bit, whatever other rows are computed with it."""
        ...

    def forward(self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset()) -> ForwardOutput:
        """Run the rows of `batch`, writing their keys and values to `cache`."""
        ...


@runtime_checkable
class Sliceable(Model, Protocol):
    """A model of which a part is a model, and which can begin with a residual stream instead of tokens."""

    def forward(
        self, batch: ForwardBatch, cache: Pages, needs: frozenset[int] = frozenset(), given: GivenRows | None = None
    ) -> ForwardOutput:
        """See `Model`."""
        ...

    def part(self, layers: Sequence[int], without: Sublayers = NONE) -> Sliceable:
        """Some of its layers, rising, some of these `without` attention or MLP, and its last norm and head as a model,
        in the same memory. It reads and writes a layer's keys and values where the whole model does.
        """
        ...


@runtime_checkable
class Narrowable(Sliceable, Protocol):
    """A model whose routers can be told which experts to choose from."""

    def narrowed(self, allowed: Sequence[Tensor], top_k: int) -> Narrowable:
        """The same, in the same memory, with routers that pick `top_k` of each mixture's experts that are allowed, each
        [count] uint8; which these are may change between forwards.
        """
        ...


@runtime_checkable
class Adaptable(Model, Protocol):
    """A model that can run each row with a LoRA adapter of its own."""

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """Rows may have one of these from now on, by its place among them (`ForwardBatch.adapters`)."""
        ...


@runtime_checkable
class Streamed(Model, Protocol):
    """A model of which some layers may not be on the device."""

    def substituted(self, checkpoint: Checkpoint, weights: WeightFormat) -> Model:
        """The same with layers in another format in place of those."""
        ...


@runtime_checkable
class Refreshable(Model, Protocol):
    """A model whose weights can be replaced."""

    def refresh(self, checkpoint: Checkpoint) -> None:
        """Compute with the layers and the last norm of `checkpoint` from now on, of the same shapes; words stay.

        In place, and only between forwards: captured graphs know nothing but addresses.
        """
        ...


@runtime_checkable
class ReadsSources(Model, Protocol):
    """A decoder behind an encoder."""

    def share_encoder(self, other: Model) -> bool:
        """Read with the encoder of `other` from now on, if it is the same one; whether it is."""
        ...


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightFormat = FORMATS["stored"],
    progress: Progress = lambda *_: None,
    strict: bool = False,
    offload: float = 0.0,
) -> Model:
    """The fastest decoder there is for this device and dtype that can run the model."""
    if isinstance(checkpoint, UniversalCheckpoint):
        if offload:
            raise InvalidRequest(
                "Only our own decoder takes its layers from elsewhere; this model runs on transformers'."
            )
        return _universal(checkpoint, dtype, device, weights)
    on_gpu = device.type == "cuda" and dtype != torch.float64
    if on_gpu and _is_taken("GPU", gpu_refuses(checkpoint.config), checkpoint):
        from draftwood.model.cuda import CudaTransformer  # Triton is there where CUDA is

        return CudaTransformer(checkpoint, dtype, device, weights, strict, progress, offload)
    alone = ranks_of(checkpoint).size == 1  # our CPU kernels run layers in one call, with no sums between
    library = kernels() if alone and device.type == "cpu" and dtype == torch.float32 else None
    if library is not None and _is_taken("CPU", native.refuses(checkpoint.config), checkpoint):
        if offload:
            return StreamedNative(library, checkpoint, weights, progress, offload)
        return NativeTransformer(library, checkpoint, weights, progress)
    if dtype == torch.bfloat16 and device.type == "cpu":
        avoid_broken_amx()
    return Transformer(checkpoint, dtype, device, weights, offload)


def _universal(
    checkpoint: UniversalCheckpoint, dtype: torch.dtype, device: torch.device, weights: WeightFormat
) -> Model:
    require_supported(checkpoint.name, dtype, device, weights, checkpoint.config.encoder is not None)
    if checkpoint.config.encoder is not None:
        from draftwood.model.universal_seq2seq import Seq2SeqModel  # transformers is an extra

        return Seq2SeqModel(checkpoint, dtype, device)
    from draftwood.model.universal import UniversalModel

    return UniversalModel(checkpoint, dtype, device)


def implementations(config: ModelConfig) -> dict[str, str]:
    """What would run a model on a CPU and on a GPU, in words."""
    if isinstance(config, UniversalConfig):
        gpu = "not yet: use --device cpu" if config.encoder else "the same, in float32 (--dtype float32)"
        return {"CPU": RUN_BY_TRANSFORMERS, "GPU": gpu}
    ours, torch_only = "our own kernels", "torch's own operations: our kernels do not know"
    reasons = {"CPU": native.refuses(config), "GPU": gpu_refuses(config)}
    return {device: ours if reason is None else f"{torch_only} {reason}" for device, reason in reasons.items()}


def _is_taken(kernels: str, reason: str | None, checkpoint: Checkpoint) -> bool:
    """Whether a backend runs the model; if not, that is said."""
    if reason is not None:
        log.warning(
            "%s: our %s kernels do not know %s; it runs on torch's own operations, which is slower.",
            checkpoint.name, kernels, reason,
        )  # fmt: skip
    return reason is None


def require_strict(model: Model) -> None:
    """Refuse a model whose numbers depend on what else is in the batch."""
    if model.strict:
        return
    if isinstance(model.config, UniversalConfig):
        raise InvalidRequest("Strict mode needs our own kernels, and this model runs on transformers' own modules.")
    if model.device.type != "cpu":
        unknown = gpu_refuses(model.config)
        if unknown is not None:
            raise InvalidRequest(f"Strict mode needs our own kernels, and those for a GPU do not know {unknown}.")
        raise InvalidRequest(f"Strict mode needs our own kernels, and on a GPU they do not compute in {model.dtype}.")
    reason = f"there are none here: {why_missing()}" if why_missing() else f"they compute in float32, not {model.dtype}"
    if not why_missing() and model.dtype == torch.float32:
        reason = f"they do not know {native.refuses(model.config)}"
    raise InvalidRequest(f"Strict mode needs our own kernels, and {reason}.")


def _require_packing(model: Model) -> None:
    """Refuse an 8-bit cache where what reads it knows floats only."""
    if model.device.type != "cpu":
        raise InvalidRequest("A cache in int8 or fp8 is read on a CPU only yet; leave --cache-dtype alone on a GPU.")
    if isinstance(model.config, UniversalConfig):
        raise InvalidRequest("A model on transformers' own modules reads its cache in full; leave --cache-dtype alone.")


class ModelRunner:
    """Runs forwards against its cache."""

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        num_states: int = STATES,
        packing: Packing | None = None,
    ) -> None:
        if packing is not None:
            _require_packing(model)
        self.model = model
        self.cache = KVCache(model.config, num_pages, page_size, model.dtype, model.device, num_states, packing)

    @classmethod
    def over(cls, model: Model, cache: KVCache) -> ModelRunner:
        """A model that reads and writes another one's keys and values."""
        runner = cls.__new__(cls)
        runner.model, runner.cache = model, cache
        return runner

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        num_pages: int,
        page_size: int,
        weights: WeightFormat = FORMATS["stored"],
        progress: Progress = lambda *_: None,
        strict: bool = False,
        offload: float = 0.0,
        num_states: int = STATES,
        packing: Packing | None = None,
    ) -> ModelRunner:
        """Read the weights and set the cache up."""
        model = load_model(checkpoint, dtype, device, weights, progress, strict, offload)
        if isinstance(checkpoint, StageCheckpoint):
            if not isinstance(model, Sliceable):
                raise InvalidRequest("What runs this model knows no stages: leave pp at 1.")
            model = StageModel(model, checkpoint)
        return cls(model, num_pages, page_size, num_states, packing)

    @property
    def device(self) -> torch.device:
        """Where weights and cache live."""
        return self.model.device

    def forward(self, batch: ForwardBatch, needs: frozenset[int] = frozenset()) -> ForwardOutput:
        """Run the rows; their keys and values are in the cache afterwards."""
        return self.model.forward(batch, self.cache.memory, needs)
