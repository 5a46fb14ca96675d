"""Last-block reduction: of the programs that share a piece of work, the last to arrive finishes with what all wrote."""
# pyright: reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def last_to_arrive(arrived, at, others):
    """Whether all other programs have written what they have to say; the counter is ready for the next launch then.
    What they wrote has to be read past the caches that their answers pass by (".cg").
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrived + at, 1) == others - 1
    if last:
        tl.store(arrived + at, 0)
    return last
