"""What each kind of network is trained to do, batch by batch. The target teaches; only its own answers count.

Shapes: B rows · T places · N places that count · R draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwood.nets.dflash import BlockNet
from draftwood.nets.eagle import RecurrentNet
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.kangaroo import Kangaroo
from draftwood.nets.medusa import HeadStack
from draftwood.nets.parts import VocabularyHead
from draftwood.nets.student import Student
from draftwood.train.attention import Blocks, Causal, Unrolled, causal_mask
from draftwood.train.data import TextBatch
from draftwood.train.grading import Fixed, Grader, Truth, Weighing, summed
from draftwood.train.losses import Mix, confidence_loss, decay, exponential
from draftwood.train.teacher import Lesson, Teacher


def _answered(batch: TextBatch, ahead: int, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows and places (of the first `most`) from where the token so far ahead is the target's, in the same text.

    Found on the host, where the batch still is: a GPU would have to be waited for to know how many there are.
    """
    counts = batch.follows(ahead) & batch.answer[:, ahead:]
    row, place = counts[:, :most].nonzero(as_tuple=True)
    return row, place


class RecurrentMethod:
    """EAGLE's: guess step by step on the network's own outputs, as it will have to (training-time test)."""

    def __init__(self, net: RecurrentNet, teacher: Teacher, words: TargetEmbeddings, mix: Mix, steps: int = 5) -> None:
        self.net, self.teacher, self.words, self.steps = net, teacher, words, steps
        self.mix, self.grade, self.weigh = mix, Grader(mix, net.head), Fixed(exponential(steps, 0.8))

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net  # type: ignore[return-value]

    def losses(self, batch: TextBatch) -> dict[str, Tensor]:
        """Row i reads token i + 1 + j in step j, and guesses token i + 2 + j."""
        width, places = batch.tokens.shape[1], batch.tokens.shape[1] - self.steps - 1
        counted = [_answered(batch, j + 2, places) for j in range(self.steps)]
        lesson = self.teacher.teach(batch)
        batch, features = lesson.batch, lesson.features
        if self.net.normed:
            features = self.words.final_norm(features)
        state = self.net.fuse(features.to(self.words.dtype))[:, :places]
        attend = Unrolled(causal_mask(batch)[:, :places, :places])
        truth, graded = Truth.of(self.net.head, lesson.logits), []
        for j, (row, place) in enumerate(counted):
            embedded = self.words.embed(batch.tokens[:, 1 + j : 1 + j + places])
            state = self.net.run(embedded, state, batch.positions[:, :places] + j, attend)
            here = (row * places + place).to(state.device, non_blocking=True)
            rows, tokens = lesson.answers((row * width + place + j + 2).to(state.device, non_blocking=True))
            logits = self.net.logits(state.flatten(0, 1)[here])
            graded.append(self.grade(logits, truth.at(rows), tokens, here, len(state) * places))
        return summed(graded, self.mix, self.weigh)


class BlockMethod:
    """DFlash's and DSpark's: blocks behind random anchors, the token before each slot given."""

    def __init__(
        self,
        net: BlockNet,
        teacher: Teacher,
        words: TargetEmbeddings,
        mix: Mix,
        anchors: int = 64,
        weigh: Weighing | None = None,
    ) -> None:
        self.net, self.teacher, self.words, self.anchors = net, teacher, words, anchors
        self.mix, self.grade, self.weigh = mix, Grader(mix, net.head), weigh or Fixed(decay(net.spec.guesses, 4.0))

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net

    def losses(self, batch: TextBatch) -> dict[str, Tensor]:
        """Slot j of a block behind anchor a reads nothing but a's token, and guesses token a + j + 1."""
        anchors, width = self._anchors(batch), batch.tokens.shape[1]  # [B, A]
        counted = self._counted(batch, anchors)
        lesson = self.teacher.teach(batch)
        device, spec = lesson.row.device, self.net.spec
        output = self._run(lesson, anchors.to(device, non_blocking=True)).flatten(0, 1)  # [B * A, block, hidden]
        tokens, base = lesson.batch.tokens.flatten(), anchors + width * torch.arange(len(anchors))[:, None]
        truth, graded, doubts = Truth.of(self.net.head, lesson.logits), [], []
        for j, here in enumerate(counted):
            place = (base.flatten()[here] + j).to(device, non_blocking=True)  # of the token before each guess
            blocks = here.to(device, non_blocking=True)
            hidden = output[blocks, spec.block_size - spec.guesses + j]
            before = tokens[place]
            logits = self.net.corrected(hidden, self.net.head(hidden), before, self.words.embed(before))
            rows, guessed = lesson.answers(place + 1)
            graded.append(self.grade(logits, truth.at(rows), guessed, blocks, len(output)))
            if self.net.confidence_head is not None:
                sure = self.net.confidence_head(hidden.detach(), before)
                doubts.append(confidence_loss(sure, graded[-1].accept).mean())
        report = summed(graded, self.mix, self.weigh)
        if doubts:
            report["confidence"] = torch.stack(doubts).mean()
            report["loss"] = report["loss"] + report["confidence"]
        return report

    def _anchors(self, batch: TextBatch) -> Tensor:
        """Random places whose next token is the target's own; drawn on the host, so that a run can be resumed."""
        fit = torch.zeros_like(batch.answer)
        fit[:, :-1] = batch.answer[:, 1:] & batch.follows(1)
        fit &= batch.positions > 0
        return torch.multinomial(fit.cpu().float() + 1e-9, self.anchors, replacement=True)

    def _counted(self, batch: TextBatch, anchors: Tensor) -> list[Tensor]:
        """For each slot the blocks, of all rows in order, whose guess there is of an answer. [n] each, on the host."""
        last = batch.tokens.shape[1] - 1
        at = anchors[..., None] + 1 + torch.arange(self.net.spec.guesses)  # [B, A, guesses]
        rows, there = torch.arange(len(anchors))[:, None, None], at.clamp(max=last)
        text, answer = batch.text.cpu(), batch.answer.cpu()
        counts = (at <= last) & (text[rows, there] == text.gather(1, anchors)[..., None]) & answer[rows, there]
        return [slot.nonzero()[:, 0] for slot in counts.flatten(0, 1).unbind(1)]

    def _run(self, lesson: Lesson, anchors: Tensor) -> Tensor:
        """Outputs of all blocks. [B, A, block, hidden]."""
        batch, net = lesson.batch, self.net
        steps = torch.arange(net.spec.block_size, device=anchors.device)
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

    def __init__(self, net: HeadStack, teacher: Teacher, words: TargetEmbeddings, mix: Mix) -> None:
        self.net, self.teacher, self.words = net, teacher, words
        self.grades = [Grader(mix, head) for head in net.heads]
        self.mix, self.weigh = mix, Fixed(exponential(net.guesses, 0.8))

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net

    def losses(self, batch: TextBatch) -> dict[str, Tensor]:
        """All heads look at the same feature."""
        width = batch.tokens.shape[1]
        counted = [_answered(batch, i + 2) for i in range(len(self.grades))]
        lesson = self.teacher.teach(batch)
        features = self.words.final_norm(lesson.features.to(self.words.dtype)).flatten(0, 1)
        tokens = lesson.batch.tokens.flatten()
        truth, graded = Truth.of(self.net.heads[0], lesson.logits), []
        for i, (row, place) in enumerate(counted):
            at = (row * width + place).to(features.device, non_blocking=True)
            path = torch.stack([tokens[at + 1 + k] for k in range(i + 1)], 1)
            embedded = self.words.embed(path) if self.net.grounded else features.new_zeros(len(row), i + 1, 0)
            rows, guessed = lesson.answers(at + i + 2)
            logits = self.net.logits(i, features[at], embedded)
            graded.append(self.grades[i](logits, truth.at(rows), guessed, at, len(features)))
        return summed(graded, self.mix, self.weigh)


class StudentMethod:
    """A small language model learns the target's next-token law (DistillSpec)."""

    def __init__(
        self, net: Student | Kangaroo, head: VocabularyHead, teacher: Teacher, words: TargetEmbeddings, mix: Mix
    ) -> None:
        self.net, self.head, self.teacher, self.words = net, head, teacher, words
        self.mix, self.grade, self.weigh = mix, Grader(mix, head), Fixed(torch.ones(1))

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        return self.net

    def losses(self, batch: TextBatch) -> dict[str, Tensor]:
        """Every place of an answer counts."""
        row, place = _answered(batch, 1)
        lesson = self.teacher.teach(batch)
        at = (row * batch.tokens.shape[1] + place).to(lesson.row.device, non_blocking=True)
        hidden = self.outputs(lesson)
        rows, tokens = lesson.answers(at + 1)
        truth = Truth.of(self.head, lesson.logits).at(rows)
        grade = self.grade(self.head(hidden.flatten(0, 1)[at]), truth, tokens, at, lesson.row.numel())
        return summed([grade], self.mix, self.weigh)

    def outputs(self, lesson: Lesson) -> Tensor:
        """What the head reads at every place. [B, T, hidden]."""
        batch = lesson.batch
        return self.net.run(self.words.embed(batch.tokens), batch.positions, Causal(causal_mask(batch)))


class ShallowMethod(StudentMethod):
    """An adapter learns to say after the target's first layers what the target says after all of them (Kangaroo)."""

    def __init__(self, net: Kangaroo, teacher: Teacher, words: TargetEmbeddings, mix: Mix) -> None:
        super().__init__(net, net.head, teacher, words, mix)

    def outputs(self, lesson: Lesson) -> Tensor:
        """[B, T, hidden]."""
        features = lesson.features.to(self.words.dtype)
        return self.net.run(features, lesson.batch.positions, Causal(causal_mask(lesson.batch)))
