"""What a decoder is made of, said and not coded: a family's file writes these records, a backend reads them.

Every record is frozen and hashable. A tensor's name and shape follow from them (`names.py`); whether a backend can
compute what they say, it says itself (`refuses`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from ..errors import CheckpointError
from .rope import RopeConfig, require

ACTIVATIONS = {  # as files spell them, and what they mean
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
CLAMPED = "clamped_swiglu"  # gpt-oss: gate and up within ±7, gate σ(1.702 gate) (up + 1)


class Wiring(StrEnum):
    """Where norms stand around attention and MLP, and what those read."""

    PRE = "norm, part, add"
    SANDWICH = "norm, part, norm, add"
    POST = "part, norm, add"
    PARALLEL = "attention and MLP read the same stream, each through a norm of its own"
    PARALLEL_SHARED = "attention and MLP read the same norm"

    @property
    def norms(self) -> tuple[str, ...]:
        """The layer's norms of the residual stream, by our names."""
        return _NORMS[self]

    @property
    def parallel(self) -> bool:
        """Whether attention's result is no input of the MLP."""
        return self in (Wiring.PARALLEL, Wiring.PARALLEL_SHARED)


ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM = "attention_output_norm", "mlp_output_norm"
_NORMS = {
    Wiring.PRE: (ATTENTION_NORM, MLP_NORM),
    Wiring.SANDWICH: (ATTENTION_NORM, MLP_NORM, ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM),
    Wiring.POST: (ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM),
    Wiring.PARALLEL: (ATTENTION_NORM, MLP_NORM),
    Wiring.PARALLEL_SHARED: (ATTENTION_NORM,),
}


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm; an offset of its weights (Gemma's 1 + w) is added when they are read."""

    eps: float
    centred: bool = False  # a layer norm, which takes the mean off; else the root mean square alone
    bias: bool = False


class HeadNorms(StrEnum):
    """Over what queries and keys are normed."""

    EACH = "each head, all with the same weights"
    OWN = "each head, with weights of its own"
    WHOLE = "all heads of a row together"


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """Norms of queries and keys."""

    norm: NormSpec
    over: HeadNorms = HeadNorms.EACH
    after_rope: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of a layer. Its heads and their size are the model's."""

    scale: float
    rotated: int  # the first so many dimensions of a head are turned, i with i + rotated / 2
    rope: RopeConfig | None  # None: nothing is turned
    window: int | None = None  # the token itself included; None: sees everything
    softcap: float | None = None  # scores become cap tanh(score / cap)
    sinks: bool = False  # one more score for each head, behind which no value stands
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: HeadNormSpec | None = None
    gated: bool = False  # what attention has mixed is multiplied by σ of a projection of its own
    output_scale: float = 1.0  # of what it adds

    def __post_init__(self) -> None:
        require(self.window is None or self.window > 0, f"an attention window is {self.window}; it must be positive")
        require(self.rotated > 0 and self.rotated % 2 == 0, f"{self.rotated} dimensions are rotated; it must be even")
        require(self.softcap is None or self.softcap > 0, f"an attention softcap is {self.softcap}, not positive")
        if self.rope is not None:
            self.rope.inverse_frequencies(self.rotated)  # refuses a wrong number of factors here and now


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(activate(gate) · up), or, not gated, down(activate(up))."""

    width: int
    activation: str
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0  # of what the activation reads
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        require(self.width > 0, f"an MLP is {self.width} wide, which must be positive")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A router, which weighs its `top_k` best of `count` MLPs by a softmax, and perhaps one MLP that always runs."""

    count: int
    top_k: int
    expert: MlpSpec
    normalised: bool = True  # the weights of those chosen add up to one
    router_bias: bool = False
    shared: MlpSpec | None = None  # weighed by a gate of its own, σ of one number
    shared_gate: bool = True  # False: the shared one counts in full

    def __post_init__(self) -> None:
        require(0 < self.top_k <= self.count, f"{self.top_k} of {self.count} experts are asked for each token")
        require(self.count <= _MOST_EXPERTS, f"it has {self.count} experts; {_MOST_EXPERTS} are the most supported")


_MOST_EXPERTS = 4096


class Gating(StrEnum):
    """How a Mamba-2 mixer's result meets its gate."""

    PLAIN = "times silu(gate)"
    BEFORE_NORM = "times silu(gate), then normed"
    AFTER_NORM = "normed, then times silu(gate)"


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A state space mixer: S ← exp(-exp(A) Δ) S + Δ x Bᵀ, y = S C + D x, behind a short convolution of x, B and C."""

    heads: int
    head_dim: int
    groups: int  # of heads that share B and C
    state: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    least_step: float = 0.0  # Δ
    most_step: float = math.inf
    gating: Gating = Gating.BEFORE_NORM
    eps: float = 1e-5
    input_scales: tuple[float, ...] = (1.0,) * 5  # of gate, x, B, C and Δ
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        sizes = (self.heads, self.head_dim, self.groups, self.state)
        _require_sizes("Mamba-2", sizes, self.kernel)
        require(self.heads % self.groups == 0, f"{self.heads} heads cannot share {self.groups} groups evenly")
        require(len(self.input_scales) == _INPUTS, f"{len(self.input_scales)} multipliers are given for 5 inputs")

    @property
    def width(self) -> int:
        """Numbers of a row that the output projection reads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a row that the convolution reads."""
        return self.width + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Numbers of a row that the input projection makes: gate, x, B, C, Δ."""
        return self.width + self.channels + self.heads

    @property
    def memory(self) -> tuple[int, int, int]:
        """Heads, numbers of a value, numbers of a key."""
        return self.heads, self.head_dim, self.state


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """A gated delta net: S ← a S, then S ← S + β (v - S k) kᵀ, y = S q, behind a short convolution of q, k and v."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    conv_bias: bool = False
    output_bias: bool = False
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        _require_sizes("delta", (self.key_heads, self.value_heads, self.key_dim, self.value_dim), self.kernel)
        require(
            self.value_heads % self.key_heads == 0,
            f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly",
        )

    @property
    def width(self) -> int:
        """Numbers of a row that the output projection reads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers of a row that the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.width

    @property
    def projected(self) -> int:
        """Numbers of a row that the input projection makes: q, k, v, gate, β, a."""
        return self.channels + self.width + 2 * self.value_heads

    @property
    def memory(self) -> tuple[int, int, int]:
        """Heads, numbers of a value, numbers of a key."""
        return self.value_heads, self.value_dim, self.key_dim


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A convolution over the last few tokens, between two gates."""

    width: int
    kernel: int
    bias: bool = False
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        _require_sizes("convolution", (self.width,), self.kernel)

    @property
    def conv_bias(self) -> bool:
        """Of the convolution."""
        return self.bias

    @property
    def output_bias(self) -> bool:
        """Of the output projection."""
        return self.bias

    @property
    def channels(self) -> int:
        """Numbers of a row that the convolution reads."""
        return self.width

    @property
    def projected(self) -> int:
        """Numbers of a row that the input projection makes: gate before, gate behind, x."""
        return 3 * self.width

    @property
    def memory(self) -> None:
        """The last tokens are all there is."""
        return


RecurrentSpec = Mamba2Spec | GatedDeltaSpec | ShortConvSpec
_INPUTS = 5
_LARGEST = 1 << 20  # than which no published model has a larger part


def _require_sizes(what: str, sizes: tuple[int, ...], kernel: int) -> None:
    for size in sizes:
        require(0 < size <= _LARGEST, f"its {what} layers have a part of size {size}; 1 to {_LARGEST} are supported")
    require(1 < kernel <= _LONGEST_KERNEL, f"its convolutions are {kernel} long; 2 to {_LONGEST_KERNEL} are supported")


_LONGEST_KERNEL = 64


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: attention, a recurrent mixer, or both side by side behind one norm; then an MLP. Some have not all."""

    attention: AttentionSpec | None
    mlp: MlpSpec | ExpertsSpec | None
    norm: NormSpec
    wiring: Wiring = Wiring.PRE
    residual_scale: float = 1.0  # of what attention and MLP add
    recurrent: RecurrentSpec | None = None

    def __post_init__(self) -> None:
        whole = self.attention is not None and self.recurrent is None and self.mlp is not None
        require(whole or self.wiring is Wiring.PRE, "layers without attention or MLP need norms before each part")

    @property
    def norms(self) -> tuple[str, ...]:
        """The layer's norms of the residual stream, by our names."""
        mixes = self.attention is not None or self.recurrent is not None
        missing = ({ATTENTION_NORM} if not mixes else set()) | ({MLP_NORM} if self.mlp is None else set())
        return tuple(name for name in self.wiring.norms if name not in missing)

    @property
    def window(self) -> int | None:
        """Of its attention."""
        return None if self.attention is None else self.attention.window

    @property
    def only_attention(self) -> AttentionSpec:
        """Its attention, for backends that refuse layers without."""
        if self.attention is None:
            raise CheckpointError("A layer has no attention, and this backend runs no such layers.")
        return self.attention

    @property
    def only_mlp(self) -> MlpSpec | ExpertsSpec:
        """Its MLP, for backends that refuse layers without."""
        if self.mlp is None:
            raise CheckpointError("A layer has no MLP, and this backend runs no such layers.")
        return self.mlp

    @property
    def unusual(self) -> str | None:
        """What backends do not know that run nothing but attention with an MLP behind it."""
        if self.recurrent is not None:
            return "recurrent layers"
        if self.attention is None or self.mlp is None:
            return "layers that are attention or an MLP alone"
        if isinstance(self.mlp, ExpertsSpec) and self.mlp.shared is not None and not self.mlp.shared_gate:
            return "an MLP that counts in full beside experts"
        scaled = isinstance(self.mlp, MlpSpec) and (self.mlp.gate_scale, self.mlp.output_scale) != (1.0, 1.0)
        if scaled or self.attention.gated or self.attention.output_scale != 1.0:
            return "gates and scales of attention and MLP"
        return None

    def attending(self, **changes: object) -> LayerSpec:
        """The same layer with its attention changed; one without attention as it is."""
        if self.attention is None:
            return self
        return replace(self, attention=replace(self.attention, **changes))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """Features that an encoder reads instead of tokens, always as many."""

    bins: int
    frames: int


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """What stands before a decoder whose layers also attend to an encoder's states."""

    max_source: int  # states that the encoder makes, or tokens that it reads
    max_text: int  # positions of the decoder
    start: int  # the token that the decoder's text begins with
    opening: tuple[int, ...]  # its text where the caller gives none: the start, and what has to follow it
    vocab_size: int  # of what the encoder reads
    same_words: bool  # what it reads is written in the decoder's tokens
    features: FeatureShape | None = None  # None: it reads tokens


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """What a model that sees images has in its prompts for them."""

    token: int  # stands for a piece of an image
    frame: tuple[int, int] | None = None  # tokens in front of an image and behind it; templates write the first alone
    sees_ahead: bool = False  # pieces of an image see each other, whichever comes first


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What happens before the first layer and behind the last."""

    embedding_scale: float = 1.0
    learned_positions: bool = False
    final_norm: NormSpec | None = None  # None: as the plain layers'
    logit_scale: float = 1.0
    logit_softcap: float | None = None
