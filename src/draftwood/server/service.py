"""What the routes do: ask, wait, answer. One service is one engine with its admission."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from draftwood.drafters.lookups import chosen_from
from draftwood.engine.images import Conversation
from draftwood.engine.intake import Prompt
from draftwood.engine.requests import EngineRequest
from draftwood.engine.served import ServedEngine
from draftwood.engine.sources import WithSource, paired
from draftwood.request import Event, FinishReason, SamplingParams, SpeculationStats
from draftwood.server.admission import Admission, Arrival, Ticket
from draftwood.server.choice_state import Choice
from draftwood.server.config import ServerConfig
from draftwood.server.echo import Echo, check_entries
from draftwood.server.errors import ApiError, invalid
from draftwood.server.formatters import ChatWriter, CompletionWriter, Writer
from draftwood.server.health import Monitor
from draftwood.server.keys import Caller, KeyRing
from draftwood.server.live import Live
from draftwood.server.metrics import Metrics
from draftwood.server.parsing import chat_params, chat_text, completion_params, only_echoes
from draftwood.server.response_models import LawCard, ModelCard
from draftwood.server.schemas import ChatRequest, CompletionRequest, Message, Sampling, TokenizeRequest
from draftwood.server.streaming import EventStream, Reply, answer_at_once
from draftwood.server.tools import ToolBox
from draftwood.server.tracing import Tracer
from draftwood.verifiers import LAWS

LONG = 64 << 10  # bytes of a request from which on its prompt counts as long


class Service:
    """Answers requests with one engine."""

    def __init__(self, llm: ServedEngine, config: ServerConfig, drafter: str, offers: Sequence[str]) -> None:
        self.llm = llm
        self.config = config
        self.drafters = list(dict.fromkeys((drafter, *chosen_from(drafter), "none", *offers)))
        self.keys = KeyRing(config.keys)
        self.metrics = Metrics(llm, config.model_name, vllm_names=config.vllm_names)
        self.admission = Admission(llm, config, self.metrics.heard, sole_caller=len(self.keys.callers) == 1)
        self.monitor = Monitor(llm, self.admission, config.stall_seconds)
        self.live = Live(llm, self.metrics, self.admission, self.monitor)
        self.started = int(time.time())
        laws = [entry() for entry in LAWS.values()]
        self._laws = [LawCard(name=law.name, lossless=law.lossless, exact_for=str(law.scope)) for law in laws]

    @property
    def _branching(self) -> list[str]:
        """Drafters whose trees may have branches."""
        default, *others = self.drafters
        card = self.llm.card
        laws = {default: card.drafter.law} | {str(o.name): o.law for o in card.offers or () if o.name in others}
        return [name for name, law in laws.items() if not law.chain]

    @property
    def card(self) -> ModelCard:
        """The model, for /v1/models."""
        return ModelCard(
            id=self.config.model_name,
            created=self.started,
            max_model_len=self.llm.card.max_length,
            drafter=self.drafters[0],
            drafters=self.drafters,
            branching=self._branching,
            law=self.llm.intake.default_law,
            laws=self._laws,
            max_nodes=self.llm.card.max_nodes,
            cache_dtype=self.llm.card.cache_dtype,
        )

    @property
    def cards(self) -> list[ModelCard]:
        """The model, and each of its adapters as a model."""
        model = self.card
        return [model, *(model.model_copy(update={"id": name, "parent": model.id}) for name in self.llm.card.adapters)]

    def card_of(self, name: str) -> ModelCard:
        """One of them."""
        self._check_model(name, "model")
        return next(card for card in self.cards if card.id == name)

    def _check_model(self, name: str, field: str) -> None:
        """Refuse other models' names."""
        there = (self.config.model_name, *self.llm.card.adapters)
        if name not in there:
            listed = " and ".join(f"'{own}'" for own in there)
            are = "are" if len(there) > 1 else "is"
            raise ApiError(404, f"The model '{name}' is not here; {listed} {are}.", "model_not_found", field)

    def adapter_of(self, body: Sampling) -> str | None:
        """The adapter that a request names, as its model or in `lora`."""
        named = [(field, name) for field, name in (("model", body.model), ("lora", body.lora)) if name is not None]
        for field, name in named:
            self._check_model(name, field)
        adapters = {name for _, name in named if name in self.llm.card.adapters}
        if len(adapters) > 1:
            raise invalid("model and lora name two different adapters; give one of them.", "lora")
        return next(iter(adapters), None)

    def called(self, body: Sampling) -> str:
        """What a request's answers call the model."""
        return self.adapter_of(body) or self.config.model_name

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Go on with a conversation."""
        writer = ChatWriter(
            self.called(body),
            self.llm.intake.tokenizer,
            tells_usage=_tells_usage(body),
            logprobs=bool(body.logprobs),
        )
        return await self.converse(body, request, writer)

    async def converse(self, body: ChatRequest, request: Request, writer: Writer) -> Response:
        """Go on with a conversation; `writer` decides which API's objects the answer is written in."""
        adapter, toolbox = self.adapter_of(body), ToolBox.of(body)
        params = replace(chat_params(body, toolbox, self.llm.card.max_length), adapter=adapter)
        params = _salted(params, request.state.caller)
        arrival = self._arrival(body, request, params)

        def prepare() -> list[EngineRequest]:
            return self._requests([self._conversation(body.messages, toolbox)], params, arrival.caller)

        ticket = await self.admission.take(arrival, prepare, params.n, patient=not body.stream)
        return await self._respond(body, request, ticket, params, writer, reads_calls=toolbox is not None)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Go on with texts."""
        adapter = self.adapter_of(body)
        params = _salted(replace(completion_params(body), adapter=adapter), request.state.caller)
        arrival = self._arrival(body, request, params)
        prompts = _prompts(body)
        count = len(prompts) * params.n
        echoes: list[Echo] = []
        writer = CompletionWriter(
            adapter or self.config.model_name,
            self.llm.intake.tokenizer,
            echoes,
            params.n,
            tells_usage=_tells_usage(body),
            logprobs=body.logprobs is not None,
        )

        def prepare() -> list[EngineRequest]:
            requests = self._requests(prompts, params, arrival.caller)  # refuses what is too long before it is decoded
            if body.echo:
                echoes.extend(self._echoes(prompts, requests, params))
            return requests

        if only_echoes(body):
            self.admission.make_room(count, arrival.caller)
            ticket = _nothing_to_do(arrival, await self.admission.prepared(arrival, prepare))
        else:
            ticket = await self.admission.take(arrival, prepare, count, patient=not body.stream)
        return await self._respond(body, request, ticket, params, writer, reads_calls=False)

    def _echoes(
        self, prompts: Sequence[Prompt], requests: Sequence[EngineRequest], params: SamplingParams
    ) -> Iterator[Echo]:
        """Each prompt as it is repeated: decoded once, however many answers it gets."""
        if params.prompt_logprobs is not None:
            check_entries(sum(len(r.tokens) for r in requests), params.n, params.prompt_logprobs)
        make = Echo.of if params.prompt_logprobs is None else Echo.scored
        plain = (prompt.prompt or "" if isinstance(prompt, WithSource) else prompt for prompt in prompts)
        tokenizer = self.llm.intake.tokenizer
        return (make(prompt, request.tokens, tokenizer) for prompt, request in zip(plain, requests, strict=True))

    def _requests(self, prompts: Sequence[Prompt], params: SamplingParams, caller: Caller) -> list[EngineRequest]:
        return [self.llm.intake.request(prompt, params, caller.name)[1] for prompt in prompts]

    def _conversation(self, messages: Sequence[Message], toolbox: ToolBox | None) -> Conversation:
        text, files = chat_text(self.llm.intake.tokenizer, messages, toolbox, self.llm.intake.images)
        return Conversation(self.llm.intake.encode_text(text, special=False), files)

    def _arrival(self, body: Sampling, request: Request, params: SamplingParams) -> Arrival:
        deadline = self.config.deadline if body.deadline is None else body.deadline
        state = request.state
        takes_long = state.body_bytes > LONG or params.grammar is not None
        return Arrival(state.request_id, state.caller, deadline, takes_long)

    async def _respond(
        self,
        body: Sampling,
        request: Request,
        ticket: Ticket,
        params: SamplingParams,
        writer: Writer,
        *,
        reads_calls: bool,
    ) -> Response:
        choices = [
            Choice(
                i,
                self.llm.intake.tokenizer,
                reads_calls=reads_calls,
                prediction=asked.prediction,
                tracer=Tracer(i, self._guessing_for(asked), self.llm.intake.tokenizer) if params.trace else None,
                tells_end=writer.tells_end,
            )
            for i, asked in enumerate(request for request in ticket.requests for _ in range(request.params.n))
        ]
        report = "none" if body.speculation is None else body.speculation.report
        reply = Reply(ticket, choices, params.n, writer, report)
        request.state.figures = lambda: _figures(reply)
        if body.stream:
            return EventStream(reply.parts(), reply.ticket.close)
        return await answer_at_once(request, reply)

    def _guessing_for(self, request: EngineRequest) -> str:
        """Who drafts for an answer, by the name clients know."""
        if request.params.max_nodes == 0:
            return "none"
        drafter = request.params.drafter or self.drafters[0]
        return f"{drafter} + prediction" if request.prediction else drafter

    def tokens(self, body: TokenizeRequest) -> list[int]:
        """A text or a conversation as tokens."""
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either a prompt or messages.", "prompt")
        if body.messages is not None:
            asked = self._conversation(body.messages, None)
            return self.llm.intake.images.place(asked.tokens, asked.files)[0]
        return self.llm.intake.encode_text(body.prompt or "", special=body.add_special_tokens)

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text."""
        limit = self.llm.intake.vocab_size
        outside = next((token for token in tokens if token >= limit), None)
        if outside is not None:
            raise invalid(f"Token {outside} is not in the vocabulary (0 to {limit - 1}).", "tokens")
        return self.llm.intake.tokenizer.decode(tokens, skip_special=False)


def _salted(params: SamplingParams, caller: Caller) -> SamplingParams:
    """The same with the caller's salt: prefixes are shared neither across callers nor across salts."""
    return replace(params, cache_salt=json.dumps([caller.salt, params.cache_salt])) if caller.salt else params


def _tells_usage(body: Sampling) -> bool:
    return bool(body.stream and body.stream_options is not None and body.stream_options.include_usage)


def _nothing_to_do(arrival: Arrival, requests: list[EngineRequest]) -> Ticket:
    """Answers that end before anything is run for them."""
    watcher, cancel = (lambda *_: None), (lambda _: None)
    ticket = Ticket(arrival.request_id, requests, True, watcher, cancel, arrival.caller)
    for i, request in enumerate(requests):
        stats = SpeculationStats(prompt_tokens=request.prompt_length, seed=request.seed)
        for index in range(request.params.n):
            ticket.receive(i, Event(request.id, index, (), (), "", FinishReason.LENGTH, stats))
    return ticket


def _prompts(body: CompletionRequest) -> list[Prompt]:
    """One prompt, or each of a list, with what the encoder is to read for it."""
    given = body.prompt
    if given is None or given == []:
        if body.encoder_input is None:
            raise invalid("There is no prompt.", "prompt")
        return paired(None, body.encoder_input)[0]
    one = not isinstance(given, str) and isinstance(given[0], int)
    return paired([given] if one else given, body.encoder_input)[0]  # type: ignore[list-item, arg-type]


def _figures(reply: Reply) -> dict[str, Any]:
    """What the access log says of a request."""
    stats = [choice.stats for choice in reply.choices]
    tokens, steps = sum(s.num_tokens for s in stats), sum(s.steps for s in stats)
    first = min((s.first_token_seconds for s in stats if s.steps), default=None)
    return {
        "prompt_tokens": reply.ticket.prompt_tokens,
        "completion_tokens": tokens,
        "tokens_per_step": round(tokens / steps, 3) if steps else None,
        "first_token_seconds": None if first is None else round(first, 4),
        "finish": [choice.finish for choice in reply.choices],
        "failure": None if reply.ticket.failure is None else reply.ticket.failure.code,
    }
