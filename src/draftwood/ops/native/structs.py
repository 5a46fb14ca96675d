"""The structs of model.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p

PANEL = 32  # outputs whose weights lie side by side


class Matrix(Structure):
    """A packed weight matrix."""

    _fields_ = [
        ("storage", c_int64), ("outputs", c_int64), ("inputs", c_int64),
        ("words", c_void_p), ("scale", c_void_p), ("minimum", c_void_p), ("bias", c_void_p),
        ("rows", c_void_p), ("kinds", c_void_p),
    ]  # fmt: skip


class Norm(Structure):
    """A norm; without weights there is none."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("centred", c_int64), ("eps", c_double)]  # fmt: skip


class Expert(Structure):
    """One of the MLPs of a mixture."""

    _fields_ = [("gate_up", Matrix), ("down", Matrix)]  # fmt: skip


class Mixture(Structure):
    """A mixture of experts."""

    _fields_ = [
        ("router", Matrix), ("shared_gate", Matrix), ("experts", POINTER(Expert)), ("count", c_int64),
        ("top_k", c_int64), ("normalised", c_int64), ("allowed", c_void_p),
    ]  # fmt: skip


class Layer(Structure):
    """A decoder layer."""

    _fields_ = [
        ("qkv", Matrix), ("output", Matrix), ("gate_up", Matrix), ("down", Matrix),
        ("attention_norm", Norm), ("attention_output_norm", Norm), ("mlp_norm", Norm), ("mlp_output_norm", Norm),
        ("query_norm", Norm), ("key_norm", Norm), ("head_norms", c_int64), ("norms_turned", c_int64),
        ("window", c_int64), ("rotation", c_int64), ("rotated", c_int64),
        ("gated", c_int64), ("activation", c_int64), ("parallel", c_int64),
        ("scale", c_double), ("softcap", c_double), ("residual_scale", c_double),
        ("sinks", c_void_p), ("mixture", POINTER(Mixture)), ("cached", c_int64),
    ]  # fmt: skip


class Model(Structure):
    """A decoder."""

    _fields_ = [
        ("embedding", Matrix), ("head", Matrix), ("layers", POINTER(Layer)), ("final_norm", Norm),
        ("positions", c_void_p), ("num_layers", c_int64), ("hidden", c_int64),
        ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64), ("vocabulary", c_int64),
        ("byte_activations", c_int64),
        ("embedding_scale", c_double), ("logit_scale", c_double), ("logit_softcap", c_double),
        ("sections", c_int64 * 3),
    ]  # fmt: skip


class LowRank(Structure):
    """What an adapter adds to a matrix."""

    _fields_ = [("rank", c_int64), ("down", c_void_p), ("up", c_void_p)]  # fmt: skip


class Batch(Structure):
    """The rows of a forward."""

    _fields_ = [
        ("num_rows", c_int64), ("num_sequences", c_int64), ("num_words", c_int64),
        ("pages_per_sequence", c_int64), ("num_logits", c_int64),
        ("tokens", c_void_p), ("positions", c_void_p), ("slots", c_void_p), ("visible", c_void_p),
        ("ancestors", c_void_p), ("row_offsets", c_void_p), ("tree_base", c_void_p), ("num_keys", c_void_p),
        ("block_table", c_void_p), ("logit_rows", c_void_p),
        ("rotations", c_void_p), ("store", c_void_p), ("num_slots", c_int64), ("page_size", c_int64),
        ("logits", c_void_p), ("wanted", c_void_p), ("num_wanted", c_int64), ("features", c_void_p),
        ("residual", c_void_p), ("wide", c_void_p),
        ("adapters", c_void_p), ("low_ranks", c_void_p), ("adapted_layers", c_int64), ("most_ranks", c_int64),
        ("shrunk", c_void_p), ("added", c_void_p),
        ("packing", c_int64), ("unpacked", c_void_p), ("unpacked_size", c_int64),
        ("turns", c_void_p), ("which", c_void_p), ("embeds", c_void_p), ("words", c_void_p), ("routes", c_void_p),
    ]  # fmt: skip


class Scratch(Structure):
    """Working memory."""

    _fields_ = [
        ("threads", c_int64),
        ("hidden", c_void_p), ("input", c_void_p), ("qkv", c_void_p), ("mixed", c_void_p), ("gated", c_void_p),
        ("bytes", c_void_p), ("scale", c_void_p), ("sums", c_void_p), ("offsets", c_void_p), ("scores", c_void_p),
        ("barrier", c_void_p), ("score_size", c_int64), ("mixture", c_void_p),
    ]  # fmt: skip


class VerdictCall(Structure):
    """What a whole verdict needs; `Call` of verdict.h."""

    _fields_ = [
        ("p", c_void_p), ("q", c_void_p),
        ("vocabulary", c_int64), ("nodes", c_int64), ("trees", c_int64), ("width", c_int64), ("steps", c_int64),
        ("tokens", c_void_p), ("parents", c_void_p), ("offsets", c_void_p), ("tries", c_void_p), ("q_row", c_void_p),
        ("draw", c_void_p), ("seeds", c_void_p), ("lengths", c_void_p),
        ("tried", c_int64), ("rule", c_int64), ("distinct", c_int64), ("merged", c_void_p), ("settings", c_double * 2),
        ("path", c_void_p), ("length", c_void_p), ("bonus", c_void_p), ("drift", c_void_p),
    ]  # fmt: skip


SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "dw_forward": (None, [c_void_p, c_void_p, c_void_p]),
    "dw_attention_scores": (c_int64, [c_void_p, c_int64, c_int64]),
    "dw_mixture_bytes": (c_int64, [c_void_p, c_int64]),
    "dw_products": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "dw_linear": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "dw_pack_floats": (None, [c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64]),
    "dw_residual_mass": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 6]),
    "dw_kseq_bar": (None, [c_void_p, c_void_p, c_int64, c_int64, *[c_void_p] * 5]),
    "dw_residual_rows": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 6]),
    "dw_reject": (None, [c_void_p, c_void_p, *[c_int64] * 4, *[c_void_p] * 10]),
    "dw_derive": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "dw_uniforms": (None, [c_void_p, c_int64, c_void_p]),
    "dw_pick": (None, [c_void_p, *[c_int64] * 4, c_void_p, c_void_p]),
    "dw_race": (None, [c_void_p, *[c_int64] * 4, c_void_p, c_void_p]),
    "dw_verdict_walk": (None, [c_void_p]),
    "dw_verdict_search": (None, [c_void_p]),
    "dw_verdict_layers": (None, [c_void_p]),
    "dw_verdict_pooled": (None, [c_void_p]),
    "dw_verdict_match": (None, [c_void_p]),
    "dw_verdict_longest": (None, [c_void_p]),
    "dw_decode_rows": (None, [c_int64, c_void_p, *[c_int64] * 3, c_void_p]),
    "dw_block_product": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "dw_narrow": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64]),
    "dw_successors": (c_int64, [c_void_p, c_void_p, *[c_int64] * 5, c_void_p, c_void_p]),
    "dw_longest_end": (c_int64, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "dw_pack_codes": (None, [c_int64, *[c_void_p] * 3, c_int64, c_int64, *[c_void_p] * 3, c_int64]),
}


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes what the functions take and give."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
