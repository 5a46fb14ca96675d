"""What a drafter is trained to make small, a number for each row, and how much each position of a draft counts.

p is the teacher (the target model), q the draft, both as logits over the same tokens. Where the draft's vocabulary is
a part of the teacher's, `outside` is the teacher's probability of all other tokens. What measures acceptance (`tv`,
`nla`, `lk`, `acceptance`) then takes p as it is, since nothing outside can ever be accepted; what measures shape (`kl`,
`rkl`, `jsd`) takes p renormalised to the draft's tokens, since the rest is not the draft's to learn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from draftwood.errors import InvalidRequest

ELEMENTS = 1 << 24  # of a chunk of rows times tokens: 64 MiB for each intermediate result
GPU_ELEMENTS = 1 << 28  # there 1 GiB; smaller chunks leave it waiting for the host
RULED_OUT = -100.0  # the least log-probability, also of a token whose logit is -inf, so that 0 times it is 0
SHIFT = 3.0  # how fast `lk` turns from kl to tv as acceptance grows


class Rows:
    """One chunk of rows as log-probabilities, found once for all losses of a mix."""

    def __init__(self, p: Tensor | None, q: Tensor, targets: Tensor | None, outside: Tensor | None) -> None:
        self._p = p
        self.log_q = _log_softmax(q)  # [n, V]
        self._targets = targets
        self._outside = outside

    @cached_property
    def log_p(self) -> Tensor:
        """The teacher's, renormalised to the draft's tokens, without gradient."""
        if self._p is None:
            raise InvalidRequest("This loss needs the teacher's logits.")
        return _log_softmax(self._p.detach())  # [n, V]

    @cached_property
    def p(self) -> Tensor:
        """Probabilities of `log_p`."""
        return self.log_p.exp()  # [n, V]

    @property
    def targets(self) -> Tensor:
        """The tokens that were really next; -1 where the draft has no such token."""
        if self._targets is None:
            raise InvalidRequest("This loss needs the tokens that came next as targets.")
        return self._targets  # [n]

    @cached_property
    def log_acceptance(self) -> Tensor:
        """log of sum min(p, q), with p as it is in the teacher's whole vocabulary."""
        log_p = self.log_p
        if self._outside is not None:
            inside = (1 - self._outside.detach().to(log_p.dtype)).clamp(torch.finfo(log_p.dtype).tiny, 1)  # [n]
            log_p = log_p + inside.log()[:, None]
        return torch.minimum(log_p, self.log_q).logsumexp(-1)  # [n]


def _log_softmax(logits: Tensor) -> Tensor:
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return exact.log_softmax(-1).clamp_min(RULED_OUT)


def _ce(rows: Rows) -> Tensor:
    known = rows.targets >= 0
    picked = rows.log_q.gather(1, rows.targets.clamp_min(0)[:, None])[:, 0]
    return torch.where(known, -picked, 0.0)


def _kl(rows: Rows) -> Tensor:
    return (rows.p * (rows.log_p - rows.log_q)).sum(-1)


def _rkl(rows: Rows) -> Tensor:
    return (rows.log_q.exp() * (rows.log_q - rows.log_p)).sum(-1)


def _jsd(rows: Rows) -> Tensor:
    middle = torch.logaddexp(rows.log_p, rows.log_q) - math.log(2)  # [n, V]
    teacher = (rows.p * (rows.log_p - middle)).sum(-1)
    draft = (rows.log_q.exp() * (rows.log_q - middle)).sum(-1)
    return (teacher + draft) / 2


def _tv(rows: Rows) -> Tensor:
    return 1 - rows.log_acceptance.exp()


def _nla(rows: Rows) -> Tensor:
    return -rows.log_acceptance


def _lk(rows: Rows) -> Tensor:
    share = torch.exp(-SHIFT * rows.log_acceptance.detach().exp())
    return share * _kl(rows) + (1 - share) * _tv(rows)


def by_rows(function: Callable[..., Tensor], *tensors: Tensor | None, chunk: int) -> Tensor:
    """`function` of `chunk` rows of the tensors at a time, results joined; inside is computed again for the gradient.

    So only one chunk's intermediate results exist at any time. Give it hidden states and a function that applies the
    head, and whole logits never exist either. The function must not draw random numbers.
    """
    counts = {tensor.shape[0] for tensor in tensors if tensor is not None}
    if len(counts) != 1 or chunk < 1:
        raise InvalidRequest(f"Chunks of {chunk} rows cannot be made of tensors of {sorted(counts)} rows.")
    if max(counts) <= chunk:
        return function(*tensors)
    # Split, not sliced: the gradient of each slice would be as large as the whole.
    pieces = [itertools.repeat(None) if tensor is None else tensor.split(chunk) for tensor in tensors]
    parts = []
    for part in zip(*pieces, strict=False):
        if torch.is_grad_enabled():
            parts.append(checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(function(*part))
    return torch.cat(parts)


@dataclass(frozen=True)
class Loss:
    """One loss by name: called with logits p and q, it gives a float32 for each row (float64 for float64 logits)."""

    name: str
    of: Callable[[Rows], Tensor]
    meaning: str

    def __call__(
        self,
        p: Tensor | None,  # [N, V]
        q: Tensor,  # [N, V]
        targets: Tensor | None = None,  # [N]
        outside: Tensor | None = None,  # [N]
        *,
        chunk: int | None = None,
    ) -> Tensor:
        """The loss of each row, computed in chunks of rows; a teacher's gradient is never asked for."""
        return Mix({self.name: 1.0})(p, q, targets, outside, chunk=chunk)


ce = Loss("ce", _ce, "-log q(target); 0 where the target is -1")
kl = Loss("kl", _kl, "forward: sum p log(p / q)")
rkl = Loss("rkl", _rkl, "reverse: sum q log(q / p)")
jsd = Loss("jsd", _jsd, "Jensen-Shannon: mean of kl(p, m) and kl(q, m) with m = (p + q) / 2")
tv = Loss("tv", _tv, "total variation: 1 - a with the acceptance rate a = sum min(p, q)")
nla = Loss("nla", _nla, "-log a")
lk = Loss(
    "lk", _lk, "LK-hybrid (arXiv 2602.23881): w kl + (1 - w) tv with w = exp(-3 a) of each row, not differentiated"
)

LOSSES: Mapping[str, Loss] = MappingProxyType({loss.name: loss for loss in (ce, kl, rkl, jsd, tv, nla, lk)})
END_TO_END = (
    "e2e"  # the one loss of whole drafts instead of rows: `chain_loss`, where it is known which rows are of one
)


@dataclass(frozen=True)
class Mix:
    """A weighted sum of losses, which share their log-probabilities. `e2e` adds nothing to the sum of a row."""

    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        known = (*LOSSES, END_TO_END)
        unknown = [name for name in self.weights if name not in known]
        if unknown or not self.weights:
            raise InvalidRequest(f"A mix is made of {', '.join(known)}; not of {', '.join(unknown) or 'nothing'}.")
        bad = [weight for weight in self.weights.values() if not (math.isfinite(weight) and weight >= 0)]
        if bad or not any(self.weights.values()):
            raise InvalidRequest("The weights of a mix must be finite, none negative, and at least one positive.")

    @property
    def end_to_end(self) -> float:
        """The weight of what whole drafts lose."""
        return self.weights.get(END_TO_END, 0.0)

    def rows(self, p: Tensor | None, q: Tensor, targets: Tensor | None, outside: Tensor | None) -> Tensor:
        """The sum for each row in one go: for use inside `by_rows`, where the logits are of one chunk only."""
        return self._sum(Rows(p, q, targets, outside))

    def _sum(self, rows: Rows) -> Tensor:
        total = torch.zeros_like(rows.log_q[:, 0])  # [n]
        for name, weight in self.weights.items():
            if weight and name != END_TO_END:
                total = total + weight * LOSSES[name].of(rows)
        return total

    def __call__(
        self,
        p: Tensor | None,  # [N, V]
        q: Tensor,  # [N, V]
        targets: Tensor | None = None,  # [N]
        outside: Tensor | None = None,  # [N]
        *,
        chunk: int | None = None,
    ) -> Tensor:
        """The weighted sum for each row, computed in chunks of rows so that memory stays bounded."""
        _check(p, q, targets, outside)
        return by_rows(self.rows, p, q, targets, outside, chunk=chunk or rows_of_chunk(q.shape[1], q.device))

    def graded(
        self, p: Tensor, q: Tensor, targets: Tensor, outside: Tensor | None, *, chunk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum and the acceptance of each row, of the same log-probabilities.

        Acceptance has a gradient only if whole drafts are to be made of it.
        """
        _check(p, q, targets, outside)
        both = by_rows(self._graded, p, q, targets, outside, chunk=chunk or rows_of_chunk(q.shape[1], q.device))
        return both[:, 0], both[:, 1] if self.end_to_end else both[:, 1].detach()

    def _graded(self, p: Tensor, q: Tensor, targets: Tensor, outside: Tensor | None) -> Tensor:
        rows = Rows(p, q, targets, outside)
        total = self._sum(rows)
        # Last: what a loss of rows needs of it has its gradient already.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.end_to_end > 0):
            accepted = rows.log_acceptance.exp()
        return torch.stack([total, accepted], 1)


def parse_mix(text: str) -> Mix:
    """From "ce=0.1,tv=0.9"; a name alone has weight 1."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if name in weights:
            raise InvalidRequest(f"The loss {name} is named twice in {text!r}.")
        try:
            weights[name] = float(number) if "=" in part else 1.0
        except ValueError:
            raise InvalidRequest(f"The weight of {name} in {text!r} must be a number, not {number!r}.") from None
    return Mix(weights)


def rows_of_chunk(vocabulary: int, device: torch.device) -> int:
    """How many rows of so many tokens are worked on at a time."""
    return max(1, (GPU_ELEMENTS if device.type == "cuda" else ELEMENTS) // max(vocabulary, 1))


def _check(p: Tensor | None, q: Tensor, targets: Tensor | None, outside: Tensor | None) -> None:
    if q.dim() != 2 or (p is not None and p.shape != q.shape):
        shape = None if p is None else list(p.shape)
        raise InvalidRequest(
            f"Teacher and draft need logits of one shape [rows, tokens], not {shape}, {list(q.shape)}."
        )
    for name, tensor in (("target", targets), ("mass outside", outside)):
        if tensor is not None and tensor.shape != q.shape[:1]:
            raise InvalidRequest(f"There must be one {name} a row: {list(tensor.shape)} for {q.shape[0]} rows.")


@torch.no_grad()
def acceptance(p: Tensor, q: Tensor, outside: Tensor | None = None, *, chunk: int | None = None) -> Tensor:
    """[N]: the chance sum min(p, q) that a token drawn from q is accepted. Where a gradient is wanted, 1 - `tv`."""
    return 1 - tv(p, q, outside=outside, chunk=chunk)


@torch.no_grad()
def agreement(p: Tensor, q: Tensor) -> Tensor:
    """[N] of bool: whether both have the same likeliest token, which is acceptance at temperature 0.

    The teacher's is sought among the draft's tokens only: rows whose target is -1 are the caller's to count as misses.
    """
    return p.argmax(-1) == q.argmax(-1)


def confidence_loss(logit: Tensor, acceptance: Tensor) -> Tensor:
    """[N]: binary cross-entropy of a predicted against the real chance of acceptance, which gets no gradient."""
    chance = acceptance.detach().float().clamp(0, 1)
    return functional.binary_cross_entropy_with_logits(logit.float(), chance, reduction="none")


def chain_loss(accept: Tensor, mask: Tensor | None = None) -> Tensor:
    """[N]: minus the expected accepted length, -sum_k prod_{i<=k} a_i, of drafts with acceptances [N, K] (e2e-TV).

    Slots outside the bool `mask` neither end a draft nor count. Pass 1 - `tv`, which is differentiable; from a cold
    start most products vanish, so begin with another loss.
    """
    if accept.dim() != 2:
        raise InvalidRequest(f"Acceptances are [drafts, positions], not {list(accept.shape)}.")
    if mask is None:
        return -accept.cumprod(1).sum(1)
    alive = torch.where(mask, accept, 1.0).cumprod(1)
    return -torch.where(mask, alive, 0.0).sum(1)


def decay(positions: int, gamma: float) -> Tensor:
    """[K]: exp(-k / gamma) for k = 0, 1, …, DFlash's weights (gamma 7 for blocks of 16, 4 for 8)."""
    if gamma <= 0:
        raise InvalidRequest(f"gamma must be positive, not {gamma}.")
    return torch.exp(-torch.arange(positions) / gamma)


def exponential(positions: int, factor: float) -> Tensor:
    """[K]: factor^k for k = 0, 1, …, EAGLE-3's weights (0.8)."""
    if factor <= 0:
        raise InvalidRequest(f"The factor must be positive, not {factor}.")
    return factor ** torch.arange(positions, dtype=torch.float32)


def dpace(chances: Tensor, smoothing: float = 0.5, *, mask: Tensor | None = None) -> Tensor:
    """[..., K]: D-PACE's weights (arXiv 2605.18810) w_j = sum_{m>=j} prod_{i<=m} c_i, c = (1 - s) chance + s.

    They are the gradient of the expected accepted length by log c_j: large where a failure costs most now. Chances are
    of each row's own slots [N, K], exp(-ce) in the paper; no gradient, no norm. Slots outside the bool `mask` neither
    end a draft nor count.
    """
    if not 0 <= smoothing <= 1:
        raise InvalidRequest(f"The smoothing must be between 0 and 1, not {smoothing}.")
    smooth = (1 - smoothing) * chances.detach().float() + smoothing
    mask = torch.ones_like(smooth, dtype=torch.bool) if mask is None else mask
    alive = torch.where(mask, torch.where(mask, smooth, 1.0).cumprod(-1), 0.0)
    return torch.where(mask, alive.flip(-1).cumsum(-1).flip(-1), 0.0)
