import os

import pytest

from draftwood.model import isa


@pytest.mark.parametrize(
    ("announced", "works", "expected"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_amx_is_avoided_only_where_it_is_announced_and_broken(monkeypatch, announced, works, expected) -> None:
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    monkeypatch.setattr(isa, "announces_amx", lambda: announced)
    monkeypatch.setattr(isa, "amx_works", lambda: works)
    isa.avoid_broken_amx()
    assert (os.environ.get(isa.VARIABLE) == isa.WITHOUT_AMX) == expected


def test_the_users_own_setting_is_left_alone(monkeypatch) -> None:
    monkeypatch.setenv(isa.VARIABLE, "AVX2")
    monkeypatch.setattr(isa, "amx_works", lambda: pytest.fail("nothing to probe"))
    isa.avoid_broken_amx()
    assert os.environ[isa.VARIABLE] == "AVX2"


def test_a_machine_without_cpuinfo_announces_nothing(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(isa, "Path", lambda _: tmp_path / "missing")
    assert not isa.announces_amx()
