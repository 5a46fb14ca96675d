import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny models gain nothing from a second core, and spinning threads of two tests' engines would fight over it."""
    torch.set_num_threads(1)
