"""The network of a trained drafter's files without a drafter around it, whatever its kind: for export."""

from __future__ import annotations

import torch
from torch import nn

from draftwood.errors import CheckpointError
from draftwood.model.checkpoint import Checkpoint
from draftwood.nets.embeddings import TargetEmbeddings
from draftwood.nets.layouts.common import misfit_explained
from draftwood.nets.layouts.files import DrafterFiles
from draftwood.nets.layouts.recognition import Layout, build_net, recognise
from draftwood.nets.layouts.student import student_net


def read_net(files: DrafterFiles, target: Checkpoint) -> nn.Module:
    """In float32 and on the CPU."""
    layout = recognise(files)
    if layout in (Layout.LANGUAGE_MODEL, Layout.PARD):
        raise CheckpointError(f"{files.name} is {layout}, which other engines load as it is.")
    with misfit_explained(files, target):
        if layout in (Layout.STUDENT, Layout.MASKED_STUDENT):
            return student_net(files, target)
        return build_net(files, target.config, TargetEmbeddings(target, torch.device("cpu"), torch.float32))
