"""Training behind masks (PARD, P-EAGLE): at the i-th mask behind a text, say what stands i tokens further on.

A mask of every depth behind every place would multiply the batch by the number of guesses. So masks are dropped, the
more the deeper (COD): a place keeps those of the first few depths, since each mask reads the ones before it.

Shapes: B rows · T places · M masks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwood.errors import InvalidRequest
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.pard import ParallelEagle
from draftwood.nets.parts import VocabularyHead
from draftwood.nets.student import MaskedStudent
from draftwood.train.attention import Causal, causal_mask
from draftwood.train.data import TextBatch
from draftwood.train.grading import Fixed, Grader, Truth, summed
from draftwood.train.losses import Mix, exponential
from draftwood.train.teacher import Lesson, Teacher


@dataclass(frozen=True)
class Masks:
    """Which masks are run with a batch."""

    place: Tensor  # [B, M] int64 of the token that is the last each mask sees
    depth: Tensor  # [B, M] int64, 1 …; 0: padding of a row

    @classmethod
    def of(cls, kept: Tensor) -> Masks:
        """Of the depths at each place: kept [B, T, depths] bool, none without those before it."""
        row, place, depth = kept.nonzero(as_tuple=True)
        count = torch.bincount(row, minlength=len(kept))
        number = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
        widest = int(count.max()) if len(row) else 0
        table = torch.zeros(2, len(kept), widest, dtype=torch.int64)
        table[0, row, number], table[1, row, number] = place, depth + 1
        return cls(table[0], table[1])

    def to(self, device: torch.device) -> Masks:
        """The same elsewhere."""
        return Masks(*(part.to(device, non_blocking=True) for part in (self.place, self.depth)))

    def at(self, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row, number in its row, and place of the masks of a depth. [N] each."""
        row, number = (self.depth == depth).nonzero(as_tuple=True)
        return row, number, self.place[row, number]

    def positions(self, batch: TextBatch) -> Tensor:
        """Of places and masks. [B, T + M]."""
        return torch.cat([batch.positions, batch.positions.gather(1, self.place) + self.depth], 1)

    def sight(self, causal: Tensor) -> Tensor:
        """What places and masks see: places as in `causal` [B, T, T], masks also those before them. [B, T + M] ^ 2."""
        seen = causal.gather(1, self.place[..., None].expand(-1, -1, causal.shape[2]))  # [B, M, T]
        together = self.place[:, :, None] == self.place[:, None]
        before = (self.depth[:, None] <= self.depth[:, :, None]) & (self.depth[:, None] > 0)
        nothing = causal.new_zeros(*causal.shape[:2], self.place.shape[1])
        return torch.cat([torch.cat([causal, nothing], 2), torch.cat([seen, together & before], 2)], 1)


class Dropping:
    """COD: which masks of a batch are run."""

    def __init__(self, guesses: int, keep: float, least: float) -> None:
        """Of the masks of a depth `keep` are kept at the next, and never fewer than `least` of all."""
        if not 0 < least <= keep <= 1:
            raise InvalidRequest(f"Masks are kept by 0 < least <= keep <= 1, not by {least} and {keep}.")
        self.guesses = guesses
        self.shares = torch.tensor([max(keep**depth, least) for depth in range(1, guesses)])

    def fit(self, batch: TextBatch, ahead: int) -> Tensor:
        """From where the tokens `ahead`, `ahead` + 1, … are all the target's, and of the same text. [B, T, guesses]."""
        fit = torch.zeros(*batch.tokens.shape, self.guesses, dtype=torch.bool)
        for depth in range(min(self.guesses, batch.tokens.shape[1] - ahead)):
            further = ahead + depth
            fit[:, :-further, depth] = batch.follows(further) & batch.answer[:, further:]
        return fit & fit[..., :1]

    def kept(self, fit: Tensor) -> Tensor:
        """Masks to run, of those that fit; drawn on the host, so that a run can be resumed. [B, T, guesses - 1]."""
        noise = torch.rand(fit.shape[:2]).masked_fill(~fit[..., 0], 2.0)
        rank = noise.argsort(1).argsort(1)[..., None]
        most = (fit[..., 0].sum(1, keepdim=True) * self.shares).ceil()[:, None]  # [B, 1, guesses - 1]
        return fit[..., 1:] & (rank < most)


class BehindMasks:
    """What methods share whose networks guess behind masks: a row's own guess is `ahead` of its place."""

    ahead: int
    teacher: Teacher
    grade: Grader

    def __init__(self, mix: Mix, dropping: Dropping) -> None:
        self.mix, self.dropping, self.weigh = mix, dropping, Fixed(exponential(dropping.guesses, 0.8))

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        raise NotImplementedError

    def losses(self, batch: TextBatch) -> dict[str, Tensor]:
        """A draft may begin wherever its first token is of an answer."""
        width, fit = batch.tokens.shape[1], self.dropping.fit(batch, self.ahead)
        masks = Masks.of(self.dropping.kept(fit))
        columns = width + masks.place.shape[1]
        first, place = fit[..., 0].nonzero(as_tuple=True)
        found = [(first, place, place)] + [
            (row, width + number, place) for row, number, place in map(masks.at, range(1, self.dropping.guesses))
        ]
        lesson = self.teacher.teach(batch)
        device = lesson.row.device
        hidden = self.outputs(lesson, masks.to(device)).flatten(0, 1)
        truth, graded = Truth.of(self.grade.head, lesson.logits), []
        for depth, (row, column, place) in enumerate(found):
            drafts = (row * width + place).to(device, non_blocking=True)
            rows, tokens = lesson.answers(drafts + self.ahead + depth)
            logits = self.logits(hidden[(row * columns + column).to(device, non_blocking=True)])
            graded.append(self.grade(logits, truth.at(rows), tokens, drafts, batch.tokens.numel()))
        return summed(graded, self.mix, self.weigh)

    def outputs(self, lesson: Lesson, masks: Masks) -> Tensor:
        """Of the network at every place, then at every mask. [B, T + M, hidden]."""
        raise NotImplementedError

    def logits(self, output: Tensor) -> Tensor:
        """[N, hidden] -> [N, R]."""
        raise NotImplementedError


class MaskedMethod(BehindMasks):
    """A small language model learns the next token, and behind masks those after it (PARD)."""

    ahead = 1

    def __init__(
        self,
        net: MaskedStudent,
        head: VocabularyHead,
        teacher: Teacher,
        words: TargetEmbeddings,
        mix: Mix,
        keep: float = 0.7,
        least: float = 0.2,
    ) -> None:
        super().__init__(mix, Dropping(net.guesses, keep, least))
        self.net, self.head, self.teacher, self.words, self.grade = net, head, teacher, words, Grader(mix, head)

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net

    def outputs(self, lesson: Lesson, masks: Masks) -> Tensor:
        """[B, T + M, hidden]."""
        batch = lesson.batch
        tokens = torch.cat([batch.tokens, torch.full_like(masks.place, self.net.mask_token)], 1)
        sight = Causal(masks.sight(causal_mask(batch)))
        return self.net.run(self.words.embed(tokens), masks.positions(batch), sight)

    def logits(self, output: Tensor) -> Tensor:
        """[N, hidden] -> [N, V]."""
        return self.head(output)


class ParallelEagleMethod(BehindMasks):
    """EAGLE-3 learns to guess behind masks instead of on its own outputs (P-EAGLE)."""

    ahead = 2  # row i reads feature i and token i + 1

    def __init__(
        self,
        net: ParallelEagle,
        teacher: Teacher,
        words: TargetEmbeddings,
        mix: Mix,
        keep: float = 0.7,
        least: float = 0.2,
    ) -> None:
        super().__init__(mix, Dropping(net.ahead.guesses, keep, least))
        self.net, self.teacher, self.words, self.grade = net, teacher, words, Grader(mix, net.head)

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net

    def outputs(self, lesson: Lesson, masks: Masks) -> Tensor:
        """[B, T + M, hidden]."""
        batch, net = lesson.batch, self.net
        features = lesson.features.to(self.words.dtype)
        masked = net.mask_hidden.to(features.dtype).expand(*masks.place.shape, -1)
        hidden = torch.cat([net.fuse(features), net.fuse(masked)], 1)
        tokens = batch.tokens.new_full(hidden.shape[:2], net.ahead.mask_token)
        tokens[:, : batch.tokens.shape[1] - 1] = batch.tokens[:, 1:]  # the last place has none behind it, nor a guess
        sight = Causal(masks.sight(causal_mask(batch)))
        return net.run(self.words.embed(tokens), hidden, masks.positions(batch), sight)

    def logits(self, output: Tensor) -> Tensor:
        """[N, hidden] -> [N, R]."""
        return self.net.logits(output)
