"""The command line. Torch is imported inside commands only, so that help and version come at once."""

from draftwood.cli.app import app, main

__all__ = ["app", "main"]
