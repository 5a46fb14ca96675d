"""Trained drafters as they are published, one file for each family."""

from draftwood.nets.layouts.common import misfit_explained
from draftwood.nets.layouts.files import DrafterFiles, open_drafter
from draftwood.nets.layouts.recognition import DraftNet, Layout, build_net, recognise, self_test

__all__ = [
    "DraftNet",
    "DrafterFiles",
    "Layout",
    "build_net",
    "misfit_explained",
    "open_drafter",
    "recognise",
    "self_test",
]
