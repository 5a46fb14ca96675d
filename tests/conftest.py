import pytest
import torch

from draftwood.model.isa import avoid_broken_amx

avoid_broken_amx()  # must come before the first product of the process


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny models gain nothing from a second core, and spinning threads of two tests' engines would fight over it."""
    torch.set_num_threads(1)
