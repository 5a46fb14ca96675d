import importlib.util
import os
import random
import secrets
import sys
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
from coverage import Coverage

from draftwood.engine.worker import ComputeThread
from draftwood.faults import DrafterHealth
from draftwood.model.isa import avoid_broken_amx
from draftwood.ops import kseq
from draftwood.ops.native import kernels, library

# Of children: tests run side by side, and threads that spin would fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if not torch.cuda.is_available():  # Triton reads it when it is first imported, which no import above does
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, scope) -> None:  # type: ignore[no-untyped-def]
        """Triton 3.6 keeps scalars in arrays of one element, which NumPy from 2.4 on does not take for an int."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_numpy

    def dot_in_order(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        """Every element's products are added up in the same order, as by a tensor core: the BLAS library behind NumPy
        chooses another order for other shapes, on some processors, and then bits depend on how a kernel is tiled.
        """
        if any(x.dtype.is_floating() and x.dtype.primitive_bitwidth == 8 for x in (a, b)):
            return dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        total = np.zeros_like(d.data)
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., None, k, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = dot_in_order
    launch = interpreter.GridExecutor.__call__

    def launch_unwatched(*args, **named) -> None:  # type: ignore[no-untyped-def]
        """Counting covered lines more than doubles what the interpreter takes, and kernels are no Python elsewhere."""
        watching = sys.gettrace()
        sys.settrace(None)
        try:
            launch(*args, **named)
        finally:
            sys.settrace(watching)
            (lambda: None)()  # the counter sees lines of its callers again from the next call on

    interpreter.GridExecutor.__call__ = launch_unwatched

avoid_broken_amx()  # must come before the first product of the process

if kernels() is not None:  # children of tests, with homes of their own, need not compile them again
    os.environ.setdefault(library.SWITCH, str(library.build()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="fuzz and load the server for minutes, not for seconds")


def pytest_configure(config: pytest.Config) -> None:
    """The same cases every time: a failure is the change's, not the day's. `--thorough` looks for new ones."""
    hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
    if not config.getoption("--thorough"):
        hypothesis.settings.load_profile("same")


UNWATCHED = (  # thousands of rows of what other tests walk through too, and runs of training
    "tests/engine/test_equals_plain_decoding.py",
    "tests/engine/test_graph_runner.py::test_whatever_the_schedule",
    "tests/engine/test_smollm2.py",
    "tests/laws/test_end_to_end.py",
    "tests/laws/test_exact.py",
    "tests/ops/test_verdict.py",
    "tests/train/test_run.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Some tests run without their lines being counted, which nearly doubles what Python takes."""
    watching: list[Coverage] = []  # a worker's own, and that of a process started by one that counts
    while item.nodeid.startswith(UNWATCHED) and (latest := Coverage.current()):
        latest.stop()
        watching.append(latest)
    try:
        return (yield)
    finally:
        for each in reversed(watching):
            each.start()
        if watching and ComputeThread._shared is not None and not ComputeThread._shared._workers:
            ComputeThread._shared = None  # a thread that was there before is not watched again


@pytest.fixture(autouse=True)
def _no_luck(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed get one that depends on nothing but the test and how many it asked before."""
    monkeypatch.setattr(secrets, "randbits", random.Random(request.node.nodeid).getrandbits)


@pytest.fixture
def drafters_may_fail() -> None:
    """For tests of what happens then. In all others an exception of a drafter is raised, not made up for."""


@pytest.fixture(autouse=True)
def _drafters_work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(self: DrafterHealth, call: str, error: Exception, *, for_good: bool = False) -> None:
        raise error

    if "drafters_may_fail" not in request.fixturenames:
        monkeypatch.setattr(DrafterHealth, "failed", failed)


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether time does not matter."""
    return request.config.getoption("--thorough")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny models gain nothing from a second core, and spinning threads of two tests' engines would fight over it."""
    torch.set_num_threads(1)


@pytest.fixture
def quick_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the search for K-SEQ's bar ends, the bar is lossless; thousands of rounds need not go to its end."""
    monkeypatch.setattr(kseq, "ROUNDS", 2)
    monkeypatch.setattr(kseq, "HALVINGS", 5)
