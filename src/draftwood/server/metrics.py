"""Figures for Prometheus: vLLM's names under our prefix, and under its own if that is wanted.

Everything is counted from the engine's events, so nothing is added to a step; gauges are read when they are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draftwood.engine.client import EngineClient, Pulse
from draftwood.request import Event, FinishReason
from draftwood.server.admission import News, Ticket

PREFIX, ALIAS = "draftwood:", "vllm:"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
QUICK = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
SIZES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass
class _Course:
    """What has been counted of one answer."""

    steps: int = 0
    drafted: int = 0
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)


@dataclass
class Totals:
    """The same counts as plain numbers, for those who look at them often."""

    steps: int = 0  # of answers: a step of the engine counts for each of them that it gave tokens
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0


class RecentDepths:
    """How often guesses came true lately, by depth.

    New proposals weigh more instead of old ones less: nothing is touched but what was tried. How deep a tree was is not
    heard of, only how many nodes it had, so depths at which nothing was accepted lately are left out.
    """

    MEMORY = 0.99  # what a proposal's weight becomes, against later ones, with each of them
    SCALE = 1e9  # where numbers are brought back to size

    def __init__(self) -> None:
        self._weight = 1.0
        self._hits: list[float] = []
        self._tried: list[float] = []

    def learn(self, drafted: int, accepted: int) -> None:
        """So many nodes were guessed for an answer, and so many of them stayed."""
        self._weight /= self.MEMORY
        deepest = min(drafted, accepted + 1)
        missing = [0.0] * (deepest - len(self._hits))
        self._hits += missing
        self._tried += missing
        for depth in range(deepest):
            self._tried[depth] += self._weight
            self._hits[depth] += self._weight if depth < accepted else 0.0
        if self._weight > self.SCALE:
            self._hits = [hits / self._weight for hits in self._hits]
            self._tried = [tried / self._weight for tried in self._tried]
            self._weight = 1.0

    def shares(self) -> list[float]:
        """Of the proposals that came to a depth, how many had the right node there; from depth 1."""
        lately = [d for d, hits in enumerate(self._hits, 1) if hits > 0.01 * self._weight]
        deepest = max(lately, default=0)
        pairs = zip(self._hits[:deepest], self._tried[:deepest], strict=True)
        return [round(hits / tried, 4) if tried else 0.0 for hits, tried in pairs]


class Metrics:
    """Counts what it hears."""

    def __init__(self, llm: EngineClient, model: str, *, vllm_names: bool) -> None:
        self._llm = llm
        self._registry = CollectorRegistry()
        self._model = model
        self._courses: dict[tuple[int, int], _Course] = {}
        self.totals = Totals()
        self.depths = RecentDepths()
        self._count_requests()
        self._time_requests()
        self._show_load()
        if vllm_names:
            self._registry.register(_Alias(self._registry))

    def _counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(f"{PREFIX}{name}", text, ("model_name", *more), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"{PREFIX}{name}", text, ("model_name",), registry=self._registry, buckets=buckets)
        return made.labels(self._model)

    def _count_requests(self) -> None:
        self._success = self._counter("request_success", "Answers that ended.", "finished_reason")
        self._refused = self._counter("request_refused", "Requests that were answered with an error.", "status")
        self._position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by their place.", "position"
        )
        self._by_member = [
            self._counter(f"spec_decode_num_{kind}_tokens_per_member", f"{text} of a combination's part.", "drafter")
            for kind, text in (("draft", "Draft tokens"), ("accepted", "Accepted draft tokens"))
        ]
        self._promises = {
            kept: self._counter(f"slo_{'kept' if kept else 'violated'}", text, "promise")
            for kept, text in ((True, "Promises that were kept."), (False, "Promises that were broken."))
        }
        named = {
            "prompt_tokens": "Tokens of prompts that were read.",
            "generation_tokens": "Tokens of answers.",
            "prefix_cache_queries": "Tokens of prompts that were looked for in the cache.",
            "prefix_cache_hits": "Tokens of prompts that were found there.",
            "spec_decode_num_drafts": "Steps of an answer that guessed something.",
            "spec_decode_num_draft_tokens": "Draft tokens that the model scored.",
            "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
        }
        self._counts = {name: self._counter(name, text).labels(self._model) for name, text in named.items()}

    def _time_requests(self) -> None:
        timed = {
            "time_to_first_token_seconds": ("From arrival to the first token.", SECONDS),
            "inter_token_latency_seconds": ("Between the tokens of an answer.", QUICK),
            "request_time_per_output_token_seconds": ("Mean of an answer, after its first token.", QUICK),
            "e2e_request_latency_seconds": ("From arrival to the last token.", SECONDS),
            "request_queue_time_seconds": ("Before it first ran.", SECONDS),
            "request_inference_time_seconds": ("After it first ran.", SECONDS),
            "request_prefill_time_seconds": ("From first running to the first token.", SECONDS),
            "request_decode_time_seconds": ("From the first token to the last.", SECONDS),
            "request_prompt_tokens": ("Tokens of a prompt.", SIZES),
            "request_generation_tokens": ("Tokens of an answer.", SIZES),
        }
        self._times = {name: self._histogram(name, *about) for name, about in timed.items()}

    def _show_load(self) -> None:
        self._registry.register(_Load(self._llm, self._model))

    def heard(self, ticket: Ticket, news: News) -> None:
        """An event of some answer."""
        _, event = news
        key = event.request_id, event.index
        course = self._courses.setdefault(key, _Course())
        if event.token_ids:
            self._count_step(event, course)
        elif event.prompt_logprobs:  # nothing is generated
            self._count_prompt(event)
        if event.finish_reason is not None:
            self._count_end(event, event.finish_reason)
            del self._courses[key]

    def _count_step(self, event: Event, course: _Course) -> None:
        now, count = time.perf_counter(), len(event.token_ids)
        if course.steps == 0:
            self._times["time_to_first_token_seconds"].observe(event.stats.first_token_seconds)
            self._count_prompt(event)
        else:
            self._times["inter_token_latency_seconds"].observe((now - course.last) / count)
        self._counts["generation_tokens"].inc(count)
        self.totals.steps += 1
        self.totals.emitted += count
        self._count_guesses(event, event.stats.drafted - course.drafted)
        self._count_members(event, course)
        course.steps, course.drafted, course.last = course.steps + 1, event.stats.drafted, now

    def _count_prompt(self, event: Event) -> None:
        self._counts["prompt_tokens"].inc(event.stats.prompt_tokens)
        self._counts["prefix_cache_queries"].inc(event.stats.prompt_tokens)
        self._counts["prefix_cache_hits"].inc(event.stats.cached_prompt_tokens)

    def _count_guesses(self, event: Event, drafted: int) -> None:
        if not drafted:
            return
        accepted = sum(event.accepted)
        self.totals.drafted += drafted
        self.totals.accepted += accepted
        self.depths.learn(drafted, accepted)
        self._counts["spec_decode_num_drafts"].inc()
        self._counts["spec_decode_num_draft_tokens"].inc(drafted)
        self._counts["spec_decode_num_accepted_tokens"].inc(accepted)
        for position in range(accepted):
            self._position.labels(self._model, str(position)).inc()

    def _count_members(self, event: Event, course: _Course) -> None:
        for name, told in event.stats.members.items():
            for counter, now, before in zip(self._by_member, told, course.members.get(name, (0, 0)), strict=True):
                counter.labels(self._model, name).inc(now - before)
            course.members[name] = told

    def _count_end(self, event: Event, reason: FinishReason) -> None:
        stats = event.stats
        ended = {FinishReason.CANCELLED: "abort", FinishReason.ERROR: "error"}.get(reason, str(reason))
        self._success.labels(self._model, ended).inc()
        decode = stats.seconds - stats.first_token_seconds
        times = {
            "e2e_request_latency_seconds": stats.seconds,
            "request_queue_time_seconds": stats.queued_seconds,
            "request_inference_time_seconds": stats.seconds - stats.queued_seconds,
            "request_prefill_time_seconds": max(0.0, stats.first_token_seconds - stats.queued_seconds),
            "request_decode_time_seconds": decode,
            "request_prompt_tokens": stats.prompt_tokens,
            "request_generation_tokens": stats.num_tokens,
        }
        for name, value in times.items():
            self._times[name].observe(value)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            for promise, kept in stats.promises_kept.items():
                self._promises[kept].labels(self._model, promise).inc()
        if stats.num_tokens > 1:
            self._times["request_time_per_output_token_seconds"].observe(decode / (stats.num_tokens - 1))

    def refused(self, status: int) -> None:
        """A request that got an error instead."""
        self._refused.labels(self._model, str(status)).inc()

    def page(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)


class _Load(Collector):
    """What the engine says of itself at the moment."""

    def __init__(self, llm: EngineClient, model: str) -> None:
        self._llm = llm
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Read now."""
        pulse = self._llm.pulse
        gauges = {
            "num_requests_running": ("Answers that run.", pulse.running),
            "num_requests_waiting": ("Answers that wait.", pulse.waiting),
            "kv_cache_usage_perc": ("Share of the cache in use, 1 being all.", pulse.kv_use),
            "controller_nodes": ("Draft nodes of each sequence in the last step.", pulse.max_nodes),
        }
        counters = {
            "num_preemptions": ("Answers that started over for lack of pages.", pulse.preemptions),
            "engine_steps": ("Steps.", pulse.steps),
            "engine_failures": ("Steps that failed.", pulse.failures),
        }
        for family, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in figures.items():
                metric = family(f"{PREFIX}{name}", text, labels=("model_name",))
                metric.add_metric((self._model,), value)
                yield metric
        yield self._cache()
        yield from self._drafters(pulse)
        yield from self._decisions(pulse)

    def _decisions(self, pulse: Pulse) -> Iterable[Metric]:
        """What the controller decides, why, and what it gains."""
        why = CounterMetricFamily(
            f"{PREFIX}controller_decisions", "Steps by the reason for their size.", labels=("model_name", "reason")
        )
        who = CounterMetricFamily(
            f"{PREFIX}drafter_choices",
            "Steps of sequences by the drafter that was chosen for them, or that their request names.",
            labels=("model_name", "drafter"),
        )
        for family, counts in ((why, pulse.decisions), (who, pulse.drafted_by)):
            for kind, count in counts:
                family.add_metric((self._model, kind), count)
            yield family
        told = {"expected": pulse.expected_gain, "measured": pulse.measured_gain}
        for name, gain in told.items():
            text = f"Tokens a second with drafts, of those without, as {name}; nan: not known."
            metric = GaugeMetricFamily(f"{PREFIX}controller_{name}_gain", text, labels=("model_name",))
            metric.add_metric((self._model,), float("nan") if gain is None else gain)
            yield metric

    def _cache(self) -> Metric:
        """The cache's sizes, under the names that vLLM gives them; on a CPU they are no GPU's blocks."""
        card = self._llm.card
        names = ("model_name", "block_size", "num_gpu_blocks")
        info = GaugeMetricFamily(f"{PREFIX}cache_config_info", "Sizes of the cache, as labels.", labels=names)
        info.add_metric((self._model, str(card.page_size), str(card.num_pages)), 1)
        return info

    def _drafters(self, pulse: Pulse) -> Iterable[Metric]:
        """What has gone wrong with each drafter."""
        names = ("model_name", "drafter")
        failures = CounterMetricFamily(f"{PREFIX}drafter_failures", "Calls of a drafter that raised.", labels=names)
        disabled = GaugeMetricFamily(f"{PREFIX}drafter_disabled", "1 once a drafter is switched off.", labels=names)
        for drafter in pulse.drafters:
            failures.add_metric((self._model, drafter.name), drafter.failures)
            disabled.add_metric((self._model, drafter.name), int(drafter.disabled))
        return failures, disabled

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance."""
        return ()


class _Alias(Collector):
    """The same figures under vLLM's names, for dashboards and routers that know no others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._asking = False

    def collect(self) -> Iterable[Metric]:
        """Every other figure of the registry, renamed."""
        if self._asking:  # the registry asks every collector, this one too
            return
        self._asking = True
        try:
            originals = list(self._registry.collect())
        finally:
            self._asking = False
        for original in originals:
            copy = Metric(_renamed(original.name), original.documentation, original.type)
            copy.samples = [sample._replace(name=_renamed(sample.name)) for sample in original.samples]
            yield copy

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance."""
        return ()


def _renamed(name: str) -> str:
    return ALIAS + name.removeprefix(PREFIX)
