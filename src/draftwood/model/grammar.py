"""Grammars that answers follow, on `llguidance`: what may come next, at every node of a tree along its own path.

A tree is walked depth first; the library takes tokens back in constant time, so no state is ever copied for a node.
A grammar is a text: one of `json_grammar`'s, or the library's own notation.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import GrammarError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LONGEST = 1 << 18  # characters of a grammar
KEPT = 64  # grammars that stay compiled
# As models write JSON; with whitespace of its choice a small model may go on with nothing else for ever.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON texts that `schema` describes."""
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(dict(schema), defaults=JSON_STYLE)  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"The JSON schema cannot be used: {error}.") from error


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that a regular expression matches as a whole."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(texts: Sequence[str]) -> str:
    """The grammar of a few given texts."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in texts))


class Grammars:
    """Compiles grammars for one vocabulary. Calls may come from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # held for moments
        self._compiling = threading.Lock()

    def start(self, grammar: str) -> GrammarState:
        """The beginning of an answer that follows `grammar`."""
        if not self._tokenizer.eos_ids:
            raise GrammarError("This model has no token that ends a text, so an answer by a grammar could never end.")
        if grammar not in self._compiled:
            with self._compiling:
                matcher = self._compiled.get(grammar) or self._compile(grammar)
            self._keep(grammar, matcher)
        return GrammarState(self._copy(grammar), self._tokenizer.eos_ids, self._vocab_size)

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)

    def _copy(self, grammar: str) -> LLMatcher:
        """Of a compiled grammar; does not wait for others that are being compiled."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                return matcher.deep_copy()
        return self._compile(grammar)  # others have pushed it out meanwhile

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        if len(grammar) > LONGEST:
            raise GrammarError(f"The grammar has {len(grammar)} characters and the limit is {LONGEST}.")
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"The grammar cannot be used: {_first_line(matcher.get_error())}")
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise GrammarError("Grammars need llguidance: pip install 'draftwood[serve]'.") from error
        words = _Words(self._tokenizer, self._vocab_size)
        return LLTokenizer(TokenizerWrapper(words), n_vocab=self._vocab_size, eos_token=sorted(self._tokenizer.eos_ids))


class _Words:
    """A vocabulary as the library wants to see it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.tokens = [tokenizer.piece(token) for token in range(vocab_size)]
        # What reads as nothing may stand nowhere in a text that has to be something.
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if not piece]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), special=False)


class GrammarState:
    """One answer's place in its grammar; a `Constraint`."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._ends = ends
        self._vocab_size = vocab_size
        self._read = 0
        self.error: str | None = None

    def allowed(self, answer: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """What may follow each node of the tree. [n, V] bool."""
        rows = torch.ones(len(tokens), self._vocab_size, dtype=torch.bool)
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents[1:], 1):
            children[parent].append(node)
        self._follow(answer)
        if self.error is None:
            self._visit(0, tokens, children, rows)
        return rows

    def _follow(self, answer: Sequence[int]) -> None:
        """Read what has been committed since it was last asked."""
        if self.error is None and not self._matcher.consume_tokens(list(answer[self._read :])):
            self.error = f"The answer has left its grammar: {_first_line(self._matcher.get_error())}"
        self._read = len(answer)

    def _visit(self, node: int, tokens: Sequence[int], children: Sequence[Sequence[int]], rows: Tensor) -> None:
        """Rows of a node and of those behind it that the grammar lets one reach; the others are not reachable."""
        row = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        if self._matcher.is_error() or not bool(row.any()):
            reason = _first_line(self._matcher.get_error()) or "no token of the vocabulary goes on"
            self.error = f"The grammar cannot be followed: {reason}"
            return
        rows[node] = row
        for child in children[node]:
            if tokens[child] in self._ends or self._matcher.try_consume_tokens([tokens[child]]) != 1:
                continue
            self._visit(child, tokens, children, rows)
            if self.error is not None:
                return
            self._matcher.rollback(1)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
