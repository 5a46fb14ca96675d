from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftwood.engine.text import TextStream
from tiny import LetterDecoder


def stream(letters: str, stop: tuple[str, ...], takes: list[bool]) -> tuple[str, bool, list[str]]:
    """Push letter by letter, taking after those marked; the whole text, whether it stopped, and what came when."""
    text = TextStream(LetterDecoder(), stop)
    seen: list[str] = []
    for letter, take in zip(letters, takes, strict=False):
        stopped = text.push(ord(letter) - ord("a"), accepted=False)
        if stopped:
            break
        if take:
            seen.append("".join(piece for piece, _ in text.take()))
    else:
        stopped = False
    text.finish()
    seen.append("".join(piece for piece, _ in text.take()))
    return "".join(seen), stopped, seen


def test_text_before_a_stop_string_comes_and_the_string_never_does() -> None:
    assert stream("xxabcyy", ("abc",), [True] * 7)[:2] == ("xx", True)


def test_what_may_become_a_stop_string_is_held_back_until_it_does_not() -> None:
    text, stopped, seen = stream("xabx", ("abc",), [True] * 4)
    assert (text, stopped) == ("xabx", False)
    assert seen == ["x", "", "", "abx", ""]


def test_the_first_of_several_stop_strings_wins() -> None:
    assert stream("abcd", ("cd", "bc"), [True] * 4)[0] == "a"


@given(
    st.text("abc", max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
    st.lists(st.booleans(), min_size=14, max_size=14),
)
def test_when_text_is_taken_never_changes_it(letters: str, stop: list[str], takes: list[bool]) -> None:
    expected, stopped = letters, False
    for end in range(len(letters) + 1):
        found = [at for at in (letters[:end].find(s) for s in stop) if at >= 0]
        if found:
            expected, stopped = letters[: min(found)], True
            break
    assert stream(letters, tuple(stop), takes)[:2] == (expected, stopped)


def test_pieces_remember_who_guessed_them() -> None:
    text = TextStream(LetterDecoder(), ("cd",))
    for token, accepted in ((0, True), (1, False), (2, True)):
        text.push(token, accepted)
    assert text.take() == (("a", True), ("b", False))
    text.finish()
    assert text.take() == (("c", True),)
