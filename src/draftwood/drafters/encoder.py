"""What tokens stand for, and text from the middle of another one in a model's tokens."""

from __future__ import annotations

from collections.abc import Mapping

from draftwood.model.tokenizer import Tokenizer

Piece = tuple[bytes, bool]  # what a token stands for, and whether it is a marker


def pieces_of(tokenizer: Tokenizer, size: int) -> Mapping[Piece, int]:
    """Tokens by what they stand for. Where several stand for the same the last counts: those of a vocabulary that
    write single bytes (`<0x41>`) come before those that write text.
    """
    found: dict[Piece, int] = {}
    for token in range(min(size, tokenizer.vocab_size)):
        whole, text = tokenizer.piece(token, skip_special=False), tokenizer.piece(token)
        if whole:
            found[whole, not text] = token
    return found


class Encoder:
    """Writes pieces from the middle of a text in a model's tokens."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = {piece: token for (piece, marker), token in pieces_of(tokenizer, size).items() if not marker}
        self._longest = max(map(len, self._tokens), default=0)

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for, markers included."""
        return self._tokenizer.piece(token, skip_special=False)

    def whole(self, text: str) -> list[int]:
        """The tokens of a text from its beginning on."""
        return self._tokenizer.encode(text)

    def behind(self, before: str, text: str) -> list[int]:
        """The tokens of `text`, as they are written behind `before`."""
        written, found = self._tokenizer.encode(before + text, special=False), list[int]()
        data = text.encode()
        left = len(data)
        while left and written:
            size = len(self.bytes_of(written[-1]))
            if size > left:  # one token for the end of `before` and the beginning of `text`
                return [*self._in_pieces(data[:left]), *reversed(found)]
            found.append(written.pop())
            left -= size
        return found[::-1]

    def _in_pieces(self, data: bytes) -> list[int]:
        """The longest tokens that fit, one after the other; up to the first byte that has none."""
        found, start = list[int](), 0
        while start < len(data):
            sizes = range(min(self._longest, len(data) - start), 0, -1)
            size = next((size for size in sizes if data[start : start + size] in self._tokens), 0)
            if not size:
                break
            found.append(self._tokens[data[start : start + size]])
            start += size
        return found
