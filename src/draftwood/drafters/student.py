"""A small model that speaks with its target's own words (DistillSpec), and can go on learning while it drafts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from draftwood.drafters.model import ModelDrafter
from draftwood.drafting import Grower
from draftwood.errors import IncompatibleParts
from draftwood.model.runner import ModelRunner, Refreshable
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.shared import SharedWords
from draftwood.nets.student import Student


class StudentDrafter(ModelDrafter):
    """A `ModelDrafter` whose layers are those of a `Student`."""

    def __init__(self, student: SharedWords, runner: ModelRunner, grower: Grower) -> None:
        super().__init__(runner, grower)
        self._student = student

    @cached_property
    def words(self) -> TargetEmbeddings:
        """Its target's."""
        return TargetEmbeddings(self._student.target, self.runner.device, torch.float32)

    @property
    def module(self) -> Student:
        """Its layers as a network, with a copy of the weights it drafts with."""
        net = Student(self._student.config)
        net.load_state_dict(self._student.own)
        return net.to(self.runner.device)

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with these weights of its layers from now on. Only between steps; what was read before stays."""
        old = self._student
        # In the types they were read in: the model has no room for more.
        own = {name: weights[name].detach().to(before.dtype, copy=True) for name, before in old.own.items()}
        self._student = SharedWords(old.name, old.config, own, old.target)
        if not isinstance(self.runner.model, Refreshable):
            raise IncompatibleParts("This student's weights cannot be replaced: the model that runs them takes none.")
        self.runner.model.refresh(self._student)
