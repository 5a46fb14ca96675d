"""Answers in the making as plain data: what rank 0 tells the others of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

from draftwood.batch import Images
from draftwood.engine.sequence import Sequence
from draftwood.engine.text import TextStream
from draftwood.protocols import Constraint
from draftwood.request import SamplingParams, Slo
from draftwood.wire import packer, unpacker

_PACK = cast("Callable[[Images], Any]", packer(Images))
_MADE_THERE = ("text", "constraint", "params", "stop_ids", "source", "images")


def packed(answer: Sequence) -> dict[str, Any]:
    """An answer that has not begun."""
    plain = {f.name: getattr(answer, f.name) for f in fields(answer) if f.init and f.name not in _MADE_THERE}
    params = {f.name: getattr(answer.params, f.name) for f in fields(answer.params)}
    params["logit_bias"] = list(answer.params.logit_bias.items())  # JSON has no numbers as keys
    params["slo"] = None if answer.params.slo is None else [answer.params.slo.ttft_ms, answer.params.slo.tpot_ms]
    images = None if answer.images is None else _PACK(answer.images)
    return plain | {"params": params, "stop_ids": sorted(answer.stop_ids), "images": images}


def params_of(plain: Mapping[str, Any]) -> SamplingParams:
    """How the answer is sampled."""
    params: dict[str, Any] = dict(plain["params"])
    params["logit_bias"] = dict(map(tuple, params["logit_bias"]))
    params["slo"] = None if params["slo"] is None else Slo(*params["slo"])
    return SamplingParams(**params)


def unpacked(
    plain: Mapping[str, Any], params: SamplingParams, text: TextStream, constraint: Constraint | None
) -> Sequence:
    """The same answer on another rank."""
    return Sequence(
        **dict(plain)
        | {
            "params": params,
            "stop_ids": frozenset(plain["stop_ids"]),
            "bad_words": tuple(map(tuple, plain["bad_words"])),
            "prediction": tuple(plain["prediction"]),
            "images": unpacker(Images | None)(plain["images"]),
            "text": text,
            "constraint": constraint,
        }
    )
