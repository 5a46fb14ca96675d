"""What an engine is built from, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from draftwood.errors import InvalidRequest
from draftwood.model.weights import FORMATS, ON_ACCELERATORS, WeightFormat
from draftwood.ops.packed import PACKINGS, Packing

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

IMPLEMENTATIONS = ("auto", "own", "transformers")
CACHE_TOKENS = 16384  # on a CPU
SPARE_STATES = 4  # of recurrent layers, beyond those of the sequences that run
ROWS_OF_LARGE_TREES = 4096  # where a step waits for its weights anyway


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and places; no drafter's knobs and no law's."""

    dtype: str = "auto"  # float32 on a CPU, bfloat16 on an accelerator
    device: str = "auto"
    weights: str = "stored"  # what matrices are stored as; anything else than "stored" may round them
    impl: str = "auto"  # what computes models: own (our decoder), transformers (its modules), auto (own where known)
    strict: bool = (
        False  # the same tokens whatever drafter, tree, batch and chunking, bit for bit; refused if it cannot be
    )
    threads: int | None = None  # None: all cores
    eager: bool = False  # launch every kernel by itself instead of replaying graphs: slow, and easy to look into
    capture_seconds: float = 8.0  # for capturing steps at start; more of them are captured while the engine is idle
    cache_tokens: int = 0  # committed tokens and draft nodes that all sequences share; 0: what suits the device
    cache_dtype: str = "auto"  # of keys and values: auto is what is computed in; int8 and fp8 make another model
    cache_host_tokens: int = 0  # that host memory holds of prefixes which had to make room in the cache
    page_size: int = 64
    max_rows: int = 0  # rows of a step: pending tokens and draft nodes; 0: what suits the device
    max_running: int = 0  # sequences at a time; 0: what suits the device
    max_waiting: int = 4096
    controller: str = "auto"  # how much is drafted, such as fixed:nodes=3; see `draftwood parts`
    # Of the layers' weights, what is not kept on the device: a share (up to 1), or so many bytes.
    offload: float = 0.0
    tp: int = 1  # ranks that compute the model together, each with a part of every layer
    pp: int = 1  # ranks that compute it one after the other, each with some of the layers
    groups: int = 1  # of sequences that decode in turns, so that a remote drafter drafts for one while another decodes

    def __post_init__(self) -> None:
        known = {
            "dtype": ("auto", *DTYPES),
            "impl": IMPLEMENTATIONS,
            "weights": (*FORMATS, *ON_ACCELERATORS),
            "cache_dtype": ("auto", *PACKINGS),
        }
        for name, choices in known.items():
            if (value := getattr(self, name)) not in choices:
                unique = ", ".join(dict.fromkeys(choices))
                raise InvalidRequest(f"Unknown {name} '{value}': choose one of {unique}.")
        if self.weights != "stored" and self.dtype not in ("auto", "float32"):
            raise InvalidRequest(
                f"Weights stored as {self.weights} are computed with in float32, or in bfloat16 on a GPU, not "
                f"{self.dtype}; leave dtype alone."
            )
        for name in ("page_size", "max_waiting", "tp", "pp", "groups"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1.")
        for name in ("cache_tokens", "max_rows", "max_running"):
            if getattr(self, name) < 0:
                raise InvalidRequest(f"{name} must be at least 1, or 0 for what suits the device.")
        if self.capture_seconds < 0:
            raise InvalidRequest("capture_seconds must not be negative.")
        self._check_processes()

    def _check_processes(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise InvalidRequest("threads must be at least 1.")
        if self.cache_host_tokens < 0:
            raise InvalidRequest("cache_host_tokens must not be negative.")
        if self.offload < 0:
            raise InvalidRequest("offload must be a share of the layers (0 to 1), or a number of bytes.")
        if self.tp > 1 and self.strict:
            raise InvalidRequest("strict=True goes with tp=1: sums over ranks do not keep the order of one process.")
        if self.pp > 1 and self.tp > 1:
            raise InvalidRequest("Stages cannot be split over ranks yet: give tp or pp, not both.")
        if self.pp > 1 and self.groups > 1:
            raise InvalidRequest("Stages have groups of their own, one each: give pp or groups, not both.")
        if self.pp > 1 and self.offload:
            raise InvalidRequest("The layers of stages stay on their devices: give pp or offload, not both.")

    @property
    def ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tp * self.pp

    def with_numbers(self, **numbers: int | None) -> EngineConfig:
        """The same with these numbers, where they are given; refuses one that contradicts its own."""
        given = {name: value for name, value in numbers.items() if value is not None}
        for name, value in given.items():
            own = getattr(self, name)
            if own not in (getattr(EngineConfig, name), value):
                raise InvalidRequest(
                    f"{name}={value} contradicts the configuration's {name}={own}: give only one of them."
                )
        return replace(self, **given)

    def settled(self) -> EngineConfig:
        """The same with sizes that suit the device where none are given; a GPU's cache is settled by its memory."""
        on_gpu = self.torch_device().type == "cuda"
        return replace(
            self,
            cache_tokens=self.cache_tokens or (0 if on_gpu else CACHE_TOKENS),
            max_rows=self.max_rows or (8192 if on_gpu else ROWS_OF_LARGE_TREES if self.offload else 512),
            max_running=self.max_running or (256 if on_gpu else 64),
        )

    @property
    def num_states(self) -> int:
        """Places for states of recurrent layers: of sequences, and of prefixes where fewer run."""
        return self.max_running + SPARE_STATES

    @property
    def num_pages(self) -> int:
        """Pages that hold `cache_tokens`."""
        return -(-self.cache_tokens // self.page_size)

    def torch_device(self) -> torch.device:
        """The device, checked to be there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise InvalidRequest(f"Unknown device '{self.device}': use cpu or cuda.") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise InvalidRequest("No CUDA device is available here; use device='cpu'.")
        return device

    def weight_format(self) -> WeightFormat:
        """How matrices are stored, checked to be possible on the device."""
        kind = self.torch_device().type
        possible = FORMATS if kind == "cpu" else ON_ACCELERATORS
        if self.weights not in possible:
            raise InvalidRequest(
                f"Weights stored as {self.weights} do not run on {kind}; there you can choose {', '.join(possible)}."
            )
        return possible[self.weights]

    def cache_packing(self) -> Packing | None:
        """How keys and values are packed; None: not at all."""
        return PACKINGS.get(self.cache_dtype)

    def torch_dtype(self) -> torch.dtype:
        """The dtype that is computed in."""
        if self.dtype == "auto":
            return torch.float32 if self.torch_device().type == "cpu" else torch.bfloat16
        return DTYPES[self.dtype]
