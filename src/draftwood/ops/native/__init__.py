"""Our own CPU kernels: a little C, compiled once on the machine it runs on."""

from draftwood.ops.native.library import Kernels, kernels, why_missing

__all__ = ["Kernels", "kernels", "why_missing"]
