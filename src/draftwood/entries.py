"""Parts that can be had by name, with settings: `beam:nodes=8,width=2`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draftwood.errors import InvalidRequest


@dataclass(frozen=True)
class Entry:
    """A part that can be had by name."""

    make: Callable[..., Any]
    defaults: Mapping[str, Any]
    description: str
    on_gpu: Mapping[str, Any] = field(default_factory=dict)  # defaults that are others there
    make_on_gpu: Callable[..., Any] | None = None  # another part there
    unnamed: str = ""  # the setting that may come first without its name

    def on(self, device: torch.device) -> Entry:
        """With the defaults of a kind of device."""
        if device.type != "cuda":
            return self
        return replace(self, defaults={**self.defaults, **self.on_gpu}, make=self.make_on_gpu or self.make)

    def build(self, kind: str, name: str, settings: Mapping[str, str]) -> Any:
        """Make the part, settings taking the type of their defaults."""
        values = dict(self.defaults)
        for key, text in settings.items():
            if key not in values:
                known = ", ".join(values) or "none"
                raise InvalidRequest(f"The {kind} '{name}' has no setting '{key}' (it has: {known}).")
            values[key] = _parse(f"{kind} '{name}'", key, text, values[key])
        try:
            return self.make(**values)
        except ValueError as error:
            raise InvalidRequest(f"The {kind} '{name}' cannot be built: {error}.") from error


def _parse(part: str, key: str, text: str, default: Any) -> Any:
    try:
        if isinstance(default, tuple):
            return tuple(int(item) for item in text.split("x"))
        return type(default)(text)
    except ValueError as error:
        raise InvalidRequest(f"The {part} wants another kind of value for '{key}' than '{text}'.") from error


def split_spec(spec: str, unnamed: str = "") -> tuple[str, dict[str, str]]:
    """`"beam:nodes=8,width=2"` -> `("beam", {"nodes": "8", "width": "2"})`; the setting `unnamed` may be first without
    its name.
    """
    name, _, rest = spec.partition(":")
    settings = {}
    for number, part in enumerate(filter(None, rest.split(","))):
        if unnamed and number == 0 and "=" not in part:
            part = f"{unnamed}={part}"
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise InvalidRequest(f"'{part}' in '{spec}' is not a setting: write name=value, separated by commas.")
        settings[key.strip()] = value.strip()
    return name, settings
