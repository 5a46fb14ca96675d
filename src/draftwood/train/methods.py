"""What each kind of network is trained to do, batch by batch. The target teaches; only its own answers count.

Shapes: B rows · T places · N places that count · R draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwood.nets.block import BlockNet
from draftwood.nets.parts import VocabularyHead
from draftwood.nets.pointwise import HeadStack
from draftwood.nets.recurrent import RecurrentNet
from draftwood.nets.student import Student
from draftwood.nets.words import TargetWords
from draftwood.train.attention import Blocks, Causal, Unrolled, causal_mask
from draftwood.train.data import TextBatch
from draftwood.train.losses import Mix, agreement, confidence_loss, decay, exponential, rows_of_chunk
from draftwood.train.teacher import Lesson, Teacher


@dataclass(frozen=True)
class Graded:
    """One depth of a draft: what was lost, and how it would have fared."""

    loss: Tensor  # scalar
    acceptance: Tensor  # scalar, of a drawn guess
    agreement: Tensor  # scalar, of the likeliest guess
    rows: Tensor  # [N] the acceptance of each place


@dataclass(frozen=True)
class Truth:
    """The target's law of tokens it wrote, as far as a draft could guess them. Found once, read at every depth."""

    logits: Tensor  # [N, R]
    outside: Tensor | None  # [N] its probability of all that cannot be guessed; None: everything can
    within: Tensor | None  # [N] bool: its likeliest token can be guessed

    @classmethod
    def of(cls, head: VocabularyHead, logits: Tensor) -> Truth:
        """Of the target's logits over its whole vocabulary, [N, V]."""
        if head.tokens is None:
            return cls(logits, None, None)
        narrow = head.narrow(logits)
        chunk = rows_of_chunk(logits.shape[1], logits.device)
        whole = torch.cat([part.float().logsumexp(-1) for part in logits.split(chunk)])
        outside = 1 - (narrow.float().logsumexp(-1) - whole).exp()
        return cls(narrow, outside, narrow.amax(-1) >= logits.amax(-1))

    def at(self, rows: Tensor) -> Truth:
        """Some of it, in another order."""
        return Truth(*(part if part is None else part[rows] for part in (self.logits, self.outside, self.within)))


@dataclass
class Grader:
    """Compares draft logits with the target's where they count."""

    mix: Mix
    head: VocabularyHead

    def __call__(self, logits: Tensor, truth: Truth, tokens: Tensor) -> Graded:
        """Draft logits [N, R], the target's, and the tokens that came [N]."""
        losses, rows = self.mix.graded(truth.logits, logits, self.head.places(tokens), truth.outside)
        agrees = agreement(truth.logits, logits.detach())
        if truth.within is not None:
            agrees = agrees & truth.within
        count = max(len(rows), 1)  # no place may count at some depth, where answers are short
        return Graded(losses.sum() / count, rows.sum() / count, agrees.sum() / count, rows)


def _summed(graded: list[Graded], weights: Tensor) -> dict[str, Tensor]:
    """Losses of all depths, weighted, and what one would hear of them while training."""
    shares = (weights / weights.sum()).tolist()
    total = torch.stack([share * grade.loss for share, grade in zip(shares, graded, strict=True)]).sum()
    alive = length = torch.ones_like(graded[0].agreement)
    report = {}
    for depth, grade in enumerate(graded, 1):
        if not len(grade.rows):
            break  # nothing is known of it, nor of what lies deeper
        alive = alive * grade.agreement
        length = length + alive
        report[f"agree_{depth}"] = grade.agreement
        report[f"accept_{depth}"] = grade.acceptance
    rows = torch.tensor(float(len(graded[0].rows)), device=total.device)
    return {"loss": total, "chain": length, "tokens": rows, **report}


class RecurrentMethod:
    """EAGLE's: guess step by step on the network's own outputs, as it will have to (training-time test)."""

    def __init__(self, net: RecurrentNet, teacher: Teacher, words: TargetWords, mix: Mix, steps: int = 5) -> None:
        self.net, self.teacher, self.words, self.steps = net, teacher, words, steps
        self.grade, self.weights = Grader(mix, net.head), exponential(steps, 0.8)

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net  # type: ignore[return-value]

    def losses(self, batch: TextBatch) -> dict[str, Tensor]:
        """Row i reads token i + 1 + j in step j, and guesses token i + 2 + j."""
        lesson = self.teacher.teach(batch)
        batch, features = lesson.batch, lesson.features
        if self.net.normed:
            features = self.words.final_norm(features)
        places = batch.tokens.shape[1] - self.steps - 1
        state = self.net.fuse(features.to(self.words.dtype))[:, :places]
        attend = Unrolled(causal_mask(batch)[:, :places, :places])
        truth, graded = Truth.of(self.net.head, lesson.logits), []
        for j in range(self.steps):
            embedded = self.words.embed(batch.tokens[:, 1 + j : 1 + j + places])
            state = self.net.run(embedded, state, batch.positions[:, :places] + j, attend)
            counts = batch.follows(j + 2)[:, :places] & batch.answer[:, j + 2 : j + 2 + places]
            taught = truth.at(lesson.row[:, j + 1 : j + 1 + places][counts])
            tokens = batch.tokens[:, j + 2 : j + 2 + places][counts]
            graded.append(self.grade(self.net.logits(state[counts]), taught, tokens))
        return _summed(graded, self.weights)


class BlockMethod:
    """DFlash's and DSpark's: blocks behind random anchors, the token before each slot given."""

    def __init__(
        self, net: BlockNet, teacher: Teacher, words: TargetWords, mix: Mix, anchors: int = 64, gamma: float = 4.0
    ) -> None:
        self.net, self.teacher, self.words, self.anchors = net, teacher, words, anchors
        self.grade, self.weights = Grader(mix, net.head), decay(net.spec.guesses, gamma)

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net

    def losses(self, batch: TextBatch) -> dict[str, Tensor]:
        """Slot j of a block behind anchor a reads nothing but a's token, and guesses token a + j + 1."""
        lesson = self.teacher.teach(batch)
        batch, spec = lesson.batch, self.net.spec
        anchors = self._anchors(batch)  # [B, A]
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        steps = torch.arange(spec.block_size, device=anchors.device)
        output = self._run(lesson, anchors, steps)
        first = spec.block_size - spec.guesses
        slots = steps[: spec.guesses]
        at = anchors[..., None] + slots  # [B, A, guesses] the place before each guess
        last = batch.tokens.shape[1] - 1
        same = batch.text[rows, (at + 1).clamp(max=last)] == batch.text.gather(1, anchors)[..., None]
        counts = (at < last) & same & batch.answer[rows, (at + 1).clamp(max=last)]
        truth, graded, doubts = Truth.of(self.net.head, lesson.logits), [], []
        for j in range(spec.guesses):
            here = counts[..., j]
            hidden, place = output[:, :, first + j][here], at[..., j]
            before = batch.tokens.gather(1, place.clamp(max=last))[here]
            logits = self.net.corrected(hidden, self.net.head(hidden), before, self.words.embed(before))
            taught = truth.at(lesson.row[rows[..., 0].expand_as(place)[here], place[here]])
            grade = self.grade(logits, taught, batch.tokens.gather(1, (place + 1).clamp(max=last))[here])
            graded.append(grade)
            if self.net.confidence_head is not None:
                doubts.append(confidence_loss(self.net.confidence_head(hidden.detach(), before), grade.rows).mean())
        report = _summed(graded, self.weights)
        if doubts:
            report["confidence"] = torch.stack(doubts).mean()
            report["loss"] = report["loss"] + report["confidence"]
        return report

    def _anchors(self, batch: TextBatch) -> Tensor:
        """Random places whose next token is the target's own; drawn on the host, so that a run can be resumed."""
        fit = torch.zeros_like(batch.answer)
        fit[:, :-1] = batch.answer[:, 1:] & batch.follows(1)
        fit &= batch.positions > 0
        chances = fit.cpu().float() + 1e-9
        return torch.multinomial(chances, self.anchors, replacement=True).to(batch.tokens.device)

    def _run(self, lesson: Lesson, anchors: Tensor, steps: Tensor) -> Tensor:
        """Outputs of all blocks. [B, A, block, hidden]."""
        batch, net = lesson.batch, self.net
        context = net.context(lesson.features.to(self.words.dtype))
        known = [net.keys_values(i, context, batch.positions) for i in range(net.config.num_layers)]
        own = batch.text.gather(1, anchors)
        place = torch.arange(batch.tokens.shape[1], device=anchors.device)
        before = (batch.text[:, None] == own[..., None]) & (place < anchors[..., None])
        size, count = net.spec.block_size, anchors.shape[1]
        mask_token = net.spec.mask_token or 0
        tokens = torch.full((*anchors.shape, size), mask_token, device=anchors.device)
        tokens[..., 0] = batch.tokens.gather(1, anchors)
        embedded = self.words.embed(tokens)
        if net.mask_embedding is not None:
            masks = net.mask_embedding.to(embedded.dtype).expand(*anchors.shape, size - 1, -1)
            embedded = torch.cat([embedded[:, :, :1], masks], 2)
        positions = batch.positions.gather(1, anchors)[..., None] + steps
        output = net.run(embedded.flatten(1, 2), positions.flatten(1), Blocks(known, before, size))
        return output.unflatten(1, (count, size))


class HeadStackMethod:
    """Medusa's and Hydra's: head i guesses from the feature of place t what stands at t + 2 + i."""

    def __init__(self, net: HeadStack, teacher: Teacher, words: TargetWords, mix: Mix) -> None:
        self.net, self.teacher, self.words = net, teacher, words
        self.grades = [Grader(mix, head) for head in net.heads]
        self.weights = exponential(net.guesses, 0.8)

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net

    def losses(self, batch: TextBatch) -> dict[str, Tensor]:
        """All heads look at the same feature."""
        lesson = self.teacher.teach(batch)
        batch = lesson.batch
        features = self.words.final_norm(lesson.features.to(self.words.dtype))
        truth, graded = Truth.of(self.net.heads[0], lesson.logits), []
        for i, grade in enumerate(self.grades):
            ahead = i + 2
            counts = batch.follows(ahead) & batch.answer[:, ahead:]
            row, place = counts.nonzero(as_tuple=True)
            path = torch.stack([batch.tokens[row, place + 1 + k] for k in range(i + 1)], 1)
            embedded = self.words.embed(path) if self.net.grounded else features.new_zeros(len(row), i + 1, 0)
            logits = self.net.logits(i, features[row, place], embedded)
            taught = truth.at(lesson.row[row, place + 1 + i])
            graded.append(grade(logits, taught, batch.tokens[row, place + ahead]))
        return _summed(graded, self.weights)


class StudentMethod:
    """A small language model learns the target's next-token law (DistillSpec)."""

    def __init__(self, net: Student, head: VocabularyHead, teacher: Teacher, words: TargetWords, mix: Mix) -> None:
        self.net, self.head, self.teacher, self.words = net, head, teacher, words
        self.grade = Grader(mix, head)

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net

    def losses(self, batch: TextBatch) -> dict[str, Tensor]:
        """Every place of an answer counts."""
        lesson = self.teacher.teach(batch)
        batch = lesson.batch
        hidden = self.net.run(self.words.embed(batch.tokens), batch.positions, Causal(causal_mask(batch)))
        counts = batch.follows(1) & batch.answer[:, 1:]
        logits = self.head(hidden[:, :-1][counts])
        taught = Truth.of(self.head, lesson.logits).at(lesson.row[:, :-1][counts])
        grade = self.grade(logits, taught, batch.tokens[:, 1:][counts])
        return _summed([grade], torch.ones(1))
