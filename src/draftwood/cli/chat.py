"""A conversation in a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from draftwood.cli.flags import EngineFlags, SamplingFlags
from draftwood.cli.screen import Transcript, explain, say
from draftwood.cli.session import Message, print_answer, report
from draftwood.errors import DraftwoodError, InvalidRequest

if TYPE_CHECKING:
    from draftwood.engine.llm import LLM
    from draftwood.train.online import Adapter

HELP = """/reset        forget the conversation
/system TEXT  tell the model who it is, and start over; without TEXT, back to its own idea
/save FOLDER  keep the drafter with all it has learnt (with --adapt)
/help         this
/exit         leave (or Ctrl-D)
Ctrl-C stops an answer. What the drafter guessed right is green."""


class Chat:
    """Reads lines, answers them, and remembers."""

    def __init__(
        self,
        llm: LLM,
        engine: EngineFlags,
        sampling: SamplingFlags,
        system: str | None,
        *,
        as_json: bool,
        adapter: Adapter | None = None,
    ) -> None:
        if llm.checkpoint.config.encoder is not None:
            raise InvalidRequest(
                f"'{engine.model}' answers what its encoder reads and holds no conversations; use `draftwood generate "
                "--encoder-input`."
            )
        if not llm.tokenizer.has_chat_template:
            raise InvalidRequest(
                f"'{engine.model}' has no chat template, so it is probably a base model; use `draftwood "
                "generate --raw`, or the model's instruction-tuned version."
            )
        self._llm = llm
        self._engine = engine
        self._sampling = sampling
        self._as_json = as_json
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._messages: list[Message] = []
        self._adapter = adapter
        self._start_over(system)

    def run(self) -> None:
        """Until the end of input or /exit."""
        if self._interactive:
            say(f"{self._engine.model} with {self._engine.drafter}. /help lists what you can do.")
            with suppress(ImportError):
                import readline  # noqa: F401 - input() edits lines once it is imported
        going_on = True
        while going_on:
            try:
                going_on = self._turn()
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                say("\nCtrl-D or /exit leaves.")

    def _turn(self) -> bool:
        """Read a line and deal with it; False when it was the last."""
        line = self._read()
        if line is None or line.split()[:1] == ["/exit"]:
            return False
        if line.startswith("/"):
            self._obey(line)
        elif line:
            self._or_explain(lambda: self._answer(line), " Say /reset to start over.")
        return True

    def _read(self) -> str | None:
        if not self._interactive:
            line = sys.stdin.readline()
            return line.strip() if line else None
        try:
            return input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return None

    def _obey(self, line: str) -> None:
        order, _, rest = line.partition(" ")
        if order == "/reset":
            self._start_over(self._system)
            say("Forgotten.")
        elif order == "/system":
            self._start_over(rest.strip() or None)
            say("Starting over.")
        elif order == "/save":
            self._or_explain(lambda: self._save(rest.strip()))
        else:
            say(HELP if order == "/help" else f"There is no {order}.\n{HELP}")

    def _start_over(self, system: str | None) -> None:
        self._system = system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def _or_explain(self, do: Callable[[], None], advice: str = "") -> None:
        """A user at a terminal can mend a mistake; a script cannot, and must hear of it."""
        try:
            do()
        except DraftwoodError as error:
            if not self._interactive:
                raise
            explain(f"{error}{advice}")

    def _save(self, folder: str) -> None:
        if self._adapter is None:
            raise InvalidRequest("The drafter has learnt nothing here that could be saved: start with --adapt.")
        if not folder:
            raise InvalidRequest("Say where to: /save FOLDER.")
        saved, so_far = self._adapter.save(folder), self._adapter.progress
        say(f"{saved}: after {so_far.answers} answers and {so_far.adopted} changes for the better.")

    def _answer(self, line: str) -> None:
        params = self._sampling.params()
        asked = [*self._messages, {"role": "user", "content": line}]
        transcript = Transcript()
        try:
            print_answer(self._llm, asked, params, transcript, quiet=self._as_json)
        except KeyboardInterrupt:
            say("Stopped.")
        report(transcript, self._engine, params, as_json=self._as_json)
        if transcript.text:
            self._messages = [*asked, {"role": "assistant", "content": transcript.text}]
