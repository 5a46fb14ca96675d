"""The Python interface: one object that answers prompts, blocking, streaming or asynchronously.

from draftwood import LLM, SamplingParams

llm = LLM("smollm2", drafter="ngram")
for result in llm.generate(["Why is the sky blue?"], SamplingParams(max_tokens=64)):
    print(result.text, result.stats.tokens_per_step)
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from draftwood.assembly import AUTO, build_verifier
from draftwood.calibration import calibrate, default_controller, known_costs
from draftwood.config import EngineConfig
from draftwood.costs import StepCosts
from draftwood.drafting import Drafter
from draftwood.engine.adapters import merged
from draftwood.engine.answering import Answering
from draftwood.engine.answers import AnswerMaker
from draftwood.engine.building import Builder, Parts
from draftwood.engine.client import EngineCard, Listener, Pulse
from draftwood.engine.followers import spec_of
from draftwood.engine.images import ImageReader
from draftwood.engine.intake import Intake, Prompt
from draftwood.engine.policies import find_policy
from draftwood.engine.requests import EngineRequest
from draftwood.engine.sources import EncoderInput, PlainPrompt, paired, with_source
from draftwood.engine.team import gather, placed
from draftwood.engine.worker import Companion, ComputeThread, Worker
from draftwood.errors import DraftwoodError, InvalidRequest
from draftwood.faults import DrafterHealth
from draftwood.model.checkpoint import Checkpoint, open_checkpoint
from draftwood.model.native import Progress
from draftwood.protocols import Controller, Verifier
from draftwood.request import (
    Completion,
    Event,
    FinishReason,
    Result,
    SamplingParams,
    SpeculationStats,
)
from draftwood.settling import settle


class LLM:
    """A model with a drafter and an acceptance law.

    `model` is an alias ("smollm2"), a folder, a .gguf file or a hub id. Requests from any number of threads and
    event loops share one batch. Use it as a context manager, or call `close()`.

    Without a `drafter` it decodes plainly; the command line's default is another one, `--drafter ngram`. `threads` is
    the same as `EngineConfig(threads=…)`.

    `offers` are further drafters that requests may name, besides `none`; with them, if only an empty list, requests may
    also bring predictions.

    `lora` is the folder of an adapter that is merged into the model. `adapters` are further ones by the name that
    requests choose them by (`SamplingParams.adapter`), each in the same batches as the model itself.

    `tp` processes compute the model together, each with a part of every layer, or `pp` processes one after the other,
    each with some of the layers (docs/scale-ranks.md). They are started here, or by torchrun, where this returns on
    rank 0 alone: the others end with it.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint = "smollm2",
        *,
        drafter: str | Drafter = "none",
        offers: Sequence[str] | None = None,
        law: str | Verifier = "auto",
        tree: str | None = None,
        config: EngineConfig | None = None,
        threads: int | None = None,
        tp: int | None = None,
        pp: int | None = None,
        controller: Controller | None = None,
        progress: Progress = lambda *_: None,
        allow_pickle: bool = False,
        lora: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        config = (config or EngineConfig()).with_numbers(threads=threads, tp=tp, pp=pp)
        self._controller = controller
        if isinstance(law, str) and law != AUTO:
            build_verifier(law)  # refuse an unknown name before anything is read
        find_policy(config.controller)
        checkpoint = open_checkpoint(model, config.impl) if isinstance(model, str | Path) else model
        if config.ranks > 1 and adapters:
            raise InvalidRequest("Adapters by request are not split over ranks: merge one (lora=…), or use one rank.")
        self.checkpoint = merged(checkpoint, lora)
        self.adapters = dict(adapters or {})
        names = {"drafter": drafter, "law": law, "tree": tree}
        self._team = gather(
            config,
            self.checkpoint,
            lambda: spec_of(model, names | {"lora": lora}, config, offers=offers, allow_pickle=allow_pickle),
        )
        try:
            self._set_up(config, Parts(drafter, tree, law, offers), progress, allow_pickle)
        except BaseException:
            self._team.close()
            raise

    def _set_up(self, config: EngineConfig, parts: Parts, progress: Progress, allow_pickle: bool) -> None:
        config = placed(config)
        share = self._team.share(self.checkpoint, config)
        self.config = self._team.agreed(settle(config, share, parts.drafter))
        self.tokenizer = self.checkpoint.tokenizer()
        builder = Builder(
            self.checkpoint, share, self.config, parts, self._controller, progress, allow_pickle, self.adapters
        )
        compute = ComputeThread.shared()
        self.engine, self.laws = compute.call(builder.build)
        positions = self.checkpoint.config.max_positions
        self.card = EngineCard.of(self.engine, self.config, positions, parts.law, tuple(self.adapters))
        model = self.engine.target.model
        images = ImageReader.of(self.checkpoint, model.dtype, model.device)
        self.intake = Intake(self.checkpoint, self.card, self.laws, images)
        self.answer_maker = AnswerMaker(
            self.tokenizer,
            self.intake.grammars,
            self.laws,
            self.max_length,
            self.card.strict,
            self.checkpoint.config.encoder,
            self.card.adapters,
            self.card.cache_dtype,
            lambda name: self.card.drafter_of(name).members,
        )
        if self._team.follows:
            compute.call(lambda: self._team.follow(self.engine, self.answer_maker.unpacked))
            raise SystemExit  # what comes behind, in a program that torchrun has started, is for rank 0
        self._worker = Worker(self.engine, compute.call(lambda: self._team.drive(self.engine, config.capture_seconds)))
        gc.freeze()  # looking for garbage in all that was loaded takes a tenth of a second each time, and steps wait

    @property
    def max_length(self) -> int:
        """Tokens a prompt and its answer can have together: the context window, or the cache if that is smaller."""
        return self.card.max_length

    def calibrate(self, say: Callable[[str], None] = lambda _: None) -> StepCosts:
        """Measure what steps cost here, keep the table for later runs too, and budget by it from now on.

        A table of a busy machine (`StepCosts.doubt` says why) is not used.
        """
        self._require_one_rank("Calibrating")

        def measure() -> StepCosts:
            if self.engine.scheduler.has_work:
                raise InvalidRequest("Calibrate while no requests are running: they would be measured as well.")
            costs = calibrate(self.engine.target, say)
            trusted = costs if costs.doubt is None else None
            engine = self.engine
            policy = self.config.controller
            engine.controller = self._controller or default_controller(engine.target, engine.drafter, trusted, policy)
            return costs

        return ComputeThread.shared().call(measure)

    @property
    def is_calibrated(self) -> bool:
        """Whether the costs of steps are known for this model on this machine."""
        # On the compute thread: the number of threads is part of the table's name, and each thread has its own.
        return ComputeThread.shared().call(lambda: known_costs(self.engine.target)) is not None

    def accompany(self, companion: Companion | None) -> None:
        """Let a companion hear how answers end and work between steps; None: none any more."""
        self._require_one_rank("Learning from answers")
        self._worker.accompany(companion)

    def _require_one_rank(self, what: str) -> None:
        if self.config.ranks > 1:
            raise InvalidRequest(f"{what} works with one rank only, and this engine has {self.config.ranks}.")

    def close(self) -> None:
        """Cancel everything and free the engine's thread."""
        self._worker.close()
        ComputeThread.shared().call(self._team.dismiss)
        self._team.close()
        gc.unfreeze()  # now it may be garbage

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload  # a text is a sequence of texts too, but here it is one prompt
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: str, params: SamplingParams | None = None, *, encoder_input: None = None
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: Sequence[PlainPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        encoder_input: EncoderInput = None,
    ) -> list[Result]: ...
    @overload
    def generate(
        self,
        prompts: str | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        encoder_input: EncoderInput,
    ) -> Any: ...
    def generate(
        self,
        prompts: str | Sequence[PlainPrompt] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        encoder_input: EncoderInput = None,
    ) -> Result | list[Result]:
        """Answer a prompt, or all of a list in one batch, with `params` for all of them or a list, one for each.

        A single prompt that cannot run raises. In a list it gets a result with `finish_reason` "error" and the
        reason, and the others run on.

        A model with an encoder reads `encoder_input`: a text, token ids, or an array of features, or a list of such.
        Prompts are then how answers begin, and may be left out.
        """
        params = params or SamplingParams()
        asked, alone = paired(prompts, encoder_input)
        each = [params] * len(asked) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(asked):
            raise InvalidRequest(
                f"{len(asked)} prompts came with {len(each)} sets of parameters: give one, or one each."
            )
        if alone:
            return self._wait([self._prepare(asked[0], each[0])])[0]
        return self._wait([self._prepare_or_explain(*both) for both in zip(asked, each, strict=True)])

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> Result:
        """Answer a conversation: a list of {"role": …, "content": …}. For a model that sees images, a content may be a
        list of parts as in OpenAI's interface: {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}.
        """
        return self._wait([self._prepare(messages, params or SamplingParams())])[0]

    def stream(
        self, prompt: Prompt | None, params: SamplingParams | None = None, *, encoder_input: EncoderInput = None
    ) -> Generator[Event, None, None]:
        """Answer a prompt event by event. Leaving the loop early cancels the request."""
        answering = self._prepare(with_source(prompt, encoder_input), params or SamplingParams())
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.submit(answering.request, inbox.put)
        try:
            while not answering.done:
                event = inbox.get()
                answering.add(event)
                yield event
        finally:
            self._cancel(answering)

    def submit(self, request: EngineRequest, listener: Listener) -> None:
        """Run all answers of a request that `intake` made; `listener` hears every event, on the compute thread.

        For those who serve many callers and keep their own books; others have `stream` and `astream`.
        """
        self._worker.submit(self.answer_maker.answers(request), listener)

    def cancel(self, request_id: int) -> None:
        """End a request before the next step; its listener hears of it. One that has ended is left alone."""
        self._worker.cancel(request_id)

    @property
    def pulse(self) -> Pulse:
        """Signs of life."""
        return self._worker.pulse

    @property
    def drafter_health(self) -> Sequence[DrafterHealth]:
        """What has gone wrong with each drafter, the one for requests that name none first."""
        return self.engine.health

    @property
    def death(self) -> str | None:
        """Why it will never answer again; None while it may."""
        return self._worker.death or self._team.lost

    async def astream(
        self, prompt: Prompt | None, params: SamplingParams | None = None, *, encoder_input: EncoderInput = None
    ) -> AsyncGenerator[Event, None]:
        """`stream` for an event loop. Leaving the loop early, or being cancelled, cancels the request."""
        answering = self._prepare(with_source(prompt, encoder_input), params or SamplingParams())
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.submit(answering.request, lambda event: _call_in(loop, inbox.put_nowait, event))
        try:
            while not answering.done:
                event = await inbox.get()
                answering.add(event)
                yield event
        finally:
            self._cancel(answering)

    async def agenerate(
        self, prompt: Prompt | None, params: SamplingParams | None = None, *, encoder_input: EncoderInput = None
    ) -> Result:
        """`generate` for an event loop: one prompt; gather several to batch them."""
        answering = self._prepare(with_source(prompt, encoder_input), params or SamplingParams())
        loop, finished = asyncio.get_running_loop(), asyncio.Event()
        self._listen([answering], lambda: _call_in(loop, finished.set))
        try:
            await finished.wait()
        finally:
            self._cancel(answering)
        return answering.result()

    def _wait(self, requests: list[Answering | Result]) -> list[Result]:
        running = [request for request in requests if isinstance(request, Answering)]
        finished = threading.Event()
        self._listen(running, finished.set)
        try:
            if running:
                finished.wait()
        finally:
            for request in running:
                self._cancel(request)
        return [r.result() if isinstance(r, Answering) else r for r in requests]

    def _listen(self, requests: list[Answering], finished: Callable[[], None]) -> None:
        """Collect all events on the compute thread and call `finished` after the last.

        Waking the caller for every event would cost more than the event: on two cores it takes one away from the step.
        """
        by_id = {request.request.id: request for request in requests}

        def hear(event: Event) -> None:
            by_id[event.request_id].add(event)
            if event.finished and all(request.done for request in requests):
                finished()

        for request in requests:
            self.submit(request.request, hear)

    def _cancel(self, answering: Answering) -> None:
        if not answering.done:
            self._worker.cancel(answering.request.id)

    def _prepare_or_explain(self, prompt: Prompt, params: SamplingParams) -> Answering | Result:
        try:
            return self._prepare(prompt, params)
        except DraftwoodError as refusal:
            failed = Completion(
                0,
                "",
                (),
                (),
                FinishReason.ERROR,
                SpeculationStats(),
                seed=params.seed or 0,
                error=str(refusal),
            )
            return Result(prompt if isinstance(prompt, str) else None, (), (failed,))

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> Answering:
        return Answering(*self.intake.request(prompt, params))


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Event) -> None:
    """Call `function` in its loop; in a loop that is gone no task waits."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)
