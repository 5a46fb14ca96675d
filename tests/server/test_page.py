"""The page at `/`, in a real browser: what people see, click and type."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from draftwood import LLM, SamplingParams
from serving import Serving, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, HttpCredentials, Page, StorageState, ViewportSize

PROMPT = "the cat sat on the mat, the cat sat on"
WIDE: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 360, "height": 640}
KINDS = {"accepted", "bonus", "correction", "plain"}
ANSWER = ".turn.assistant .tokens"
SHORT: dict[str, Any] = {"max_tokens": "48", "temperature": "0", "seed": "1", "formatted": False}  # as it came

Opener = Callable[..., "Page"]


@pytest.fixture
def opened(chromium: Browser, served: Serving) -> Iterator[Opener]:
    """Opens the page in a fresh profile; afterwards nobody else was asked for anything, and the console is empty."""
    contexts, requests, complaints = [], [], []

    def open_page(settings: dict[str, Any] = SHORT, **context: Any) -> Page:
        wanted: dict[str, Any] = {"viewport": WIDE, "storage_state": remembering(served, settings)} | context
        made = chromium.new_context(**wanted)
        contexts.append(made)
        page = made.new_page()
        page.set_default_timeout(10_000)
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(served.url)
        page.wait_for_selector("#law option[value=walk]", state="attached")
        return page

    yield open_page
    for made in contexts:
        made.close()
    assert {url.split("/")[2] for url in requests} <= {served.url.split("/")[2]}
    refused = [text for text in complaints if "status of 400" not in text]  # the browser logs refusals by itself
    assert refused == []


def remembering(served: Serving, settings: dict[str, Any]) -> StorageState:
    """A profile whose owner made these settings the last time."""
    kept: Any = {"name": "draftwood.settings", "value": json.dumps(settings)}
    return {"cookies": [], "origins": [{"origin": served.url, "localStorage": [kept]}]}


@contextmanager
def slowed(llm: LLM, seconds: float = 0.02) -> Iterator[None]:
    """An engine that takes a while for a step, so that somebody can watch."""
    step = llm.engine.step

    def slowly():
        time.sleep(seconds)
        return step()

    llm.engine.step = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.engine.step = step  # type: ignore[method-assign]


def ask(page: Page, text: str = PROMPT) -> str:
    """Say something and wait for the whole answer."""
    page.fill("#message", text)
    page.press("#message", "Enter")
    page.wait_for_selector(".turn.assistant:last-child:not([aria-busy])")
    return page.locator(ANSWER).last.evaluate("answer => answer.textContent")


def tokens(page: Page) -> int:
    return page.locator(f"{ANSWER} .token").count()


def said_by(llm: LLM, *contents: str, **params: Any) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    wanted: dict[str, Any] = {"max_tokens": 48, "seed": 1} | params
    return llm.chat(messages, SamplingParams(**wanted)).text


def test_an_answer_streams_and_is_the_engines_own(opened: Opener, llm: LLM) -> None:
    page = opened()
    with slowed(llm):
        page.fill("#message", PROMPT)
        page.press("#message", "Enter")
        page.wait_for_selector(f"{ANSWER} .token", state="attached")
        seen = tokens(page)
        page.wait_for_selector(f"{ANSWER} .token:nth-child({seen + 1})", state="attached")
        assert page.is_visible("#stop")
    page.wait_for_selector("#send:visible")
    first = said_by(llm, PROMPT)
    assert page.locator(ANSWER).evaluate("answer => answer.textContent") == first
    assert page.input_value("#message") == ""
    assert ask(page, "and then") == said_by(llm, PROMPT, first, "and then")  # it knows what was said
    page.click("text=Regenerate")
    page.wait_for_selector(".turn.assistant:last-child:not([aria-busy])")
    assert page.locator(".turn").count() == 4


def test_formatted_answers_stream_too(opened: Opener, llm: LLM) -> None:
    page = opened(settings=SHORT | {"formatted": True})
    busy = ".turn.assistant[aria-busy] .formatted .token"
    with slowed(llm):
        page.fill("#message", PROMPT)
        page.press("#message", "Enter")
        page.wait_for_selector(busy, state="attached")
        seen = page.locator(busy).count()
        page.locator(busy).nth(seen).wait_for(state="attached")
    page.wait_for_selector(".turn.assistant:not([aria-busy])")
    kinds = page.locator(f"{ANSWER} .token").evaluate_all("all => all.map(one => one.dataset.kind)")
    assert {"plain", "accepted"} <= set(kinds) <= KINDS


def test_tokens_say_how_they_came(opened: Opener) -> None:
    page = opened()
    ask(page)
    kinds = page.locator(f"{ANSWER} .token").evaluate_all("all => all.map(one => one.dataset.kind)")
    assert set(kinds) <= KINDS
    assert {"plain", "accepted"} <= set(kinds)
    looks = {
        kind: page.locator(f".legend [data-kind={kind}]").evaluate(
            "one => getComputedStyle(one).backgroundColor + getComputedStyle(one).textDecorationStyle"
        )
        for kind in KINDS
    }
    assert len(set(looks.values())) == len(KINDS)
    page.locator(f"{ANSWER} [data-kind=accepted]").first.hover()
    told = page.inner_text("#tip")
    assert re.search(
        r"accepted guess.*depth\s+1.*drafter\s+ngram.*p \(model\)\s+[\d.]+.*q \(drafter\)", told, re.DOTALL
    )
    page.mouse.move(5, 5)
    page.wait_for_selector("#tip", state="hidden")


def test_the_tree_of_a_step_is_drawn_with_the_path_that_was_kept(opened: Opener) -> None:
    page = opened()
    ask(page)
    page.locator(f"{ANSWER} [data-kind=accepted]").first.click()
    page.wait_for_selector("#tree-picture .node.accepted")
    assert page.get_attribute("#step-follow", "aria-pressed") == "false"
    assert page.locator("#tree-picture .edge.accepted").count() == page.locator("#tree-picture .node.accepted").count()
    assert re.search(r"Step \d+: \d+ guess(es)? by ngram.*, [1-9]\d* kept by match", page.inner_text("#tree-words"))
    page.locator("#tree-picture .node.accepted").first.hover()
    assert "accepted guess" in page.inner_text("#tip")
    place = page.inner_text("#step-place")
    page.click("#step-back")
    assert page.inner_text("#step-place") != place
    page.focus("#tree-picture")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#step-place") == place
    page.click("#step-follow")
    last, count = page.inner_text("#step-place").split(" / ")
    assert last == count


def test_large_trees_are_laid_out_without_overlaps(opened: Opener) -> None:
    """A hundred nodes, twelve deep, through the page's own module."""
    page = opened()
    boxes, size = page.evaluate(
        """async () => {
            const { layout } = await import("/page/layout.js");
            const n = 100, chain = 12, each = value => Array(n).fill(value);
            const parents = [...Array(n).keys()].map(i => i <= chain ? i - 1 : (i * 7) % chain);
            const accepted = parents.map((_, i) => i <= 9);
            const tree = { tokens: each(1), texts: each(" token"), parents, p: each(0.5), q: each(null), accepted };
            const own = { token: 2, text: "!", kind: "correction", depth: 10, node: null, p: 1, q: null };
            const { nodes, width, height } = layout({ tree, emitted: [own] });
            return [nodes.map(({ x, y, width, kind }) => [x, y, width, kind]), [width, height]];
        }"""
    )
    assert len(boxes) == 101
    assert len({(x, y) for x, y, *_ in boxes}) == 101
    assert all(x >= 0 and x + width <= size[0] and 0 <= y <= size[1] for x, y, width, _ in boxes)
    assert {y for _, y, _, kind in boxes if kind in ("root", "accepted", "correction")} == {
        boxes[0][1]
    }  # a straight line


@pytest.mark.parametrize("order", ["sequential", "parallel"])
def test_a_race_ends_with_a_winner_and_the_same_text(opened: Opener, llm: LLM, order: str) -> None:
    page = opened(settings=SHORT | {"temperature": "0.8", "seed": "7"})
    page.click("[data-view=race]")
    page.fill("#race-prompt", PROMPT)
    page.check(f"[value={order}]")
    page.click("#race-start")
    page.wait_for_selector("#verdict .same")
    texts = page.locator(".lane .tokens").evaluate_all("all => all.map(one => one.textContent)")
    assert texts == [said_by(llm, PROMPT, temperature=0.8, seed=7)] * 2
    assert re.search(r"times as fast|dead heat", page.inner_text("#verdict"))
    assert "identical: 48 tokens" in page.inner_text("#verdict")
    assert re.search(
        r"(Plain|Speculative) finished after .* m?s, (Plain|Speculative) finished", page.inner_text("#verdict")
    )
    whole = r"48 of 48 tokens \(100 %\) · [\d.]+ m?s · [\d.]+ tokens/s · finished first"
    part = r"\d+ of 48 tokens \([\d.]+ %\) · when \w+ finished at [\d.]+ m?s; all after [\d.]+ m?s · [\d.]+ tokens/s"
    labels = page.locator(".how-far").all_inner_texts()
    first = next(i for i, label in enumerate(labels) if "finished first" in label)
    assert re.fullmatch(whole, labels[first])
    assert re.fullmatch(f"{part}|{whole}", labels[1 - first])
    values = page.locator(".lane progress").evaluate_all("all => all.map(one => [one.value, one.max])")
    assert [f"{value} of {most} tokens" for value, most in values] == [label.split(" (")[0] for label in labels]
    plain, speculative = page.locator(".lane dl").all_inner_texts()
    assert "1.00" in plain
    assert re.search(r"tokens/s\s+[\d.]+\s+tokens per step\s+[\d.]+", speculative)
    assert set(page.locator(".lane:first-child .token").evaluate_all("all => all.map(t => t.dataset.kind)")) == {
        "plain"
    }


@pytest.mark.parametrize(
    ("plain", "speculative", "result", "ratio"),
    [
        ((64, 4.0, 1.0), (64, 2.0, 2.5), "speculative", 2.0),
        ((64, 2.0, 1.0), (64, 4.0, 2.5), "plain", 2.0),
        ((64, 2.0, 1.0), (64, 2.01, 2.5), "even", 2 / 2.01),
        ((64, 6.98, 1.0), (64, 1.0, 2.59), "unsteady", None),
        ((64, 1.17, 1.0), (64, 1.0, 1.0), "unsteady", None),
        ((64, 2.7, 1.0), (64, 1.0, 2.59), "speculative", 2.7),  # within what clocks differ by
        ((64, 3.8, 1.0), (64, 1.0, 3.5), "unsteady", None),
        ((15, 4.0, 1.0), (15, 2.0, 2.5), "short", None),
        ((64, 0.09, 1.0), (64, 0.04, 2.5), "short", None),
        ((0, 0.0, None), (0, 0.0, None), "short", None),
        ((64, 4.0, 1.0), (32, 1.0, 2.5), "speculative", 2.0),  # by tokens a second: a lossy law ended elsewhere
    ],
)
def test_races_are_judged_only_where_times_mean_something(
    blank: Page, plain: tuple[Any, ...], speculative: tuple[Any, ...], result: str, ratio: float | None
) -> None:
    runs = [dict(zip(("tokens", "seconds", "perStep"), run, strict=True)) for run in (plain, speculative)]
    judged = blank.evaluate(
        "async (runs) => { const { compared } = await import('/page/compare.js'); return compared(...runs); }", runs
    )
    assert judged["result"] == result
    assert judged["ratio"] == (None if ratio is None else pytest.approx(ratio))


def test_a_race_too_short_says_so(opened: Opener) -> None:
    page = opened(settings=SHORT | {"max_tokens": "4"})
    page.click("[data-view=race]")
    assert page.locator(".how-far").all_inner_texts() == ["Not started."] * 2
    page.click("#race-start")
    page.wait_for_selector("#verdict .same")
    assert page.inner_text("#verdict strong").startswith("Too short to compare")
    assert not re.search(r"\d times as fast", page.inner_text("#verdict"))


def test_an_example_with_branches_stands_where_no_tree_is_yet(opened: Opener) -> None:
    page = opened()
    for _ in range(2):
        page.wait_for_selector("#tree-picture .node.rejected")
        assert page.inner_text("#tree-picture .example") == "Example"
        assert page.inner_text("#step-place") == "example"
        guesses, kept, tokens = map(int, re.findall(r"\d+", page.inner_text("#tree-words")))
        nodes = "#tree-picture .node"
        assert page.locator(f"{nodes}.rejected").count() == guesses - kept
        assert page.locator(f"{nodes}.accepted").count() == kept == tokens - 1
        rows = page.locator(f"{nodes} rect").evaluate_all("all => all.map(one => one.getAttribute('y'))")
        assert len(set(rows)) > 2, "it branches"
        page.locator(f"{nodes}.rejected").first.hover()
        assert "rejected guess" in page.inner_text("#tip")
        ask(page)
        page.wait_for_selector("#tree-words:text-matches('^Step')")
        assert page.locator(".example").count() == 0
        page.click("#clear")


def test_drafters_that_never_branch_say_so_and_who_does(opened: Opener, chromium: Browser, llm: LLM) -> None:
    page = opened()
    assert "ngram:shortest=1 guesses chains" in page.inner_text("#tree-hint")
    page.click("#tree-hint >> text=ngram:nodes=8,branches=2")
    assert page.input_value("#drafter") == "ngram:nodes=8,branches=2"
    assert page.inner_text("#tree-hint") == ""
    assert page.evaluate("document.activeElement.id") == "tree-picture"
    page.select_option("#drafter", "none")
    assert page.inner_text("#tree-hint") == ""
    with serving(llm, "ngram:shortest=1") as alone:
        other = chromium.new_page()
        other.goto(alone.url)
        other.wait_for_selector("#tree-hint:text-matches('--offer')")
        assert other.locator("#tree-hint button").count() == 0
        other.close()


def test_prompts_to_start_with(opened: Opener) -> None:
    page = opened(settings=SHORT | {"max_tokens": "8"})
    samples = page.locator(".samples button")
    assert samples.count() >= 2
    for i in range(samples.count()):
        samples.nth(i).click()
        page.wait_for_selector(".turn.assistant:last-child:not([aria-busy])")
        assert page.inner_text(".turn.user .tokens")
        assert samples.count() == 0
        assert page.evaluate("document.activeElement.id") == "message"
        page.click("#clear")


def test_laws_are_grouped_by_what_they_promise(opened: Opener, served: Serving) -> None:
    with served.http() as http:
        card = http.get("/v1/models").json()["data"][0]
    page = opened()
    assert page.locator("#law > option").all_text_contents() == [f"auto ({card['law']})"]
    shown = page.locator("#law optgroup").evaluate_all("all => all.map(one => [...one.children].map(o => o.value))")

    def those(lossless: bool, every: bool) -> list[str]:
        fits = [law for law in card["laws"] if law["lossless"] == lossless]
        return [law["name"] for law in fits if not lossless or (law["exact_for"] == "every tree") == every]

    assert shown == [those(True, True), those(True, False), those(False, True)]
    assert all(shown)
    lossy = page.locator("#law optgroup").last
    assert "Not lossless" in (lossy.get_attribute("label") or "")
    assert all("not lossless" in label for label in lossy.locator("option").all_text_contents())


def test_stopping_midway_keeps_what_came_and_frees_the_server(opened: Opener, llm: LLM, served: Serving) -> None:
    page = opened(settings=SHORT | {"max_tokens": "400"})
    whole = said_by(llm, PROMPT, max_tokens=400)
    with slowed(llm):
        for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
            page.fill("#message", PROMPT)
            page.press("#message", "Enter")
            page.wait_for_selector(".turn:last-child .token:nth-child(5)", state="attached")
            stop()
            page.wait_for_selector("#send:visible")
            assert "stopped" in page.locator(".figures").last.inner_text()
            part = page.locator(ANSWER).last.evaluate("answer => answer.textContent")
            assert part
            assert whole.startswith(part)
            assert part != whole
            assert page.evaluate("document.activeElement.id") == "message"
            page.click("#clear")
        page.click("[data-view=race]")
        page.click("#race-start")
        page.wait_for_selector(".lane .token", state="attached")
        page.keyboard.press("Escape")
        page.wait_for_selector("#race-start:visible")
        assert page.inner_text("#verdict") == "Stopped."
    assert served.idle()


def test_a_reload_brings_everything_back(opened: Opener) -> None:
    page = opened()
    answer = ask(page)
    page.select_option("#law", "walk")
    page.fill("#depth", "3")
    page.fill("#system", "Be brief.")
    page.uncheck("#colours")
    page.click("#theme")
    page.reload()
    page.wait_for_selector("#law option[value=walk]", state="attached")
    assert page.input_value("#law") == "walk"
    assert page.input_value("#depth") == "3"
    assert page.input_value("#system") == "Be brief."
    assert not page.is_checked("#colours")
    assert page.inner_text("#theme") == "Theme: light"
    assert page.locator(ANSWER).evaluate("answer => answer.textContent") == answer
    assert page.locator(f"{ANSWER} [data-kind=accepted]").count()
    page.wait_for_selector("#tree-picture .node")
    page.click("#clear")
    page.reload()
    assert page.locator(".turn").count() == 0


def test_a_reload_in_the_middle_keeps_what_came(opened: Opener, llm: LLM, served: Serving) -> None:
    page = opened(settings=SHORT | {"max_tokens": "1500"})
    with slowed(llm):
        page.fill("#message", PROMPT)
        page.press("#message", "Enter")
        page.wait_for_selector(f"{ANSWER} .token:nth-child(5)", state="attached")
        page.reload()
        assert page.locator(f"{ANSWER} .token").count() >= 5
        assert served.idle()


def test_settings_are_sent(opened: Opener) -> None:
    page = opened()
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.select_option("#drafter", "none")
    assert page.is_disabled("#law")
    ask(page)
    assert set(page.locator(f"{ANSWER} .token").evaluate_all("all => all.map(t => t.dataset.kind)")) == {"plain"}
    page.select_option("#drafter", "ngram:nodes=8,branches=2")
    page.select_option("#law", "match")
    page.fill("#max_nodes", "3")
    page.fill("#depth", "2")
    page.fill("#temperature", "0.7")
    page.fill("#system", "Be brief.")
    ask(page)
    report = {"report": "trace"}
    assert bodies[0]["speculation"] == report | {"drafter": "none"}
    wishes = {"drafter": "ngram:nodes=8,branches=2", "law": "match", "max_nodes": 3, "depth": 2}
    assert bodies[1]["speculation"] == report | wishes
    assert (bodies[1]["temperature"], bodies[1]["seed"], bodies[1]["max_tokens"]) == (0.7, 1, 48)
    assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]


def test_what_the_server_refuses_is_shown_where_it_was_asked(opened: Opener) -> None:
    page = opened()
    page.select_option("#law", "rrs")
    ask(page)
    assert "would not be exact" in page.inner_text(".turn .error")
    page.select_option("#law", "")
    page.click("text=Try again")
    page.wait_for_selector(f"{ANSWER} .token", state="attached")
    page.wait_for_selector(".turn.assistant:last-child:not([aria-busy])")  # meanwhile nothing else can be said
    assert page.locator(".error:visible").count() == 0
    page.select_option("#law", "rrs")
    page.click("[data-view=race]")
    page.click("#race-start")
    page.wait_for_selector("#race-error:visible")
    assert "would not be exact" in page.inner_text("#race-error")
    page.fill("#max_tokens", "0")  # the browser knows that by itself
    page.click("[data-view=chat]")
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    assert page.evaluate("document.activeElement.id") == "max_tokens"


def test_light_dark_and_the_choice_between_them(opened: Opener) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = opened(color_scheme="light"), opened(color_scheme="dark")
    assert light.evaluate(ground) != dark.evaluate(ground)
    dark.click("#theme")
    assert dark.evaluate(ground) == light.evaluate(ground)
    light.click("#theme")
    light.click("#theme")
    light.reload()
    assert light.inner_text("#theme") == "Theme: dark"
    assert light.evaluate(ground) != dark.evaluate(ground)


def test_a_phone_shows_one_thing_at_a_time_and_nothing_is_cut_off(opened: Opener) -> None:
    page = opened(viewport=PHONE, has_touch=True)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    ask(page, "the cat sat on the mat " + "m" * 200)
    for view in ("chat", "race", "tree", "live", "settings"):
        page.click(f"[data-view={view}]")
        assert page.evaluate(overflow) <= 0, view
        assert page.locator(".pane:visible").count() == 1
        assert page.get_attribute(f"[data-view={view}]", "aria-current") == "true"
    page.click("[data-view=chat]")
    page.locator(f"{ANSWER} [data-kind=accepted]").first.tap()
    box = page.locator("#tip").bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= box["x"] + box["width"] <= PHONE["width"]
    page.set_viewport_size(WIDE)
    for pane in ("#chat", "#tree", "#live", "#settings"):
        assert page.is_visible(pane)


def test_the_keyboard_is_enough(opened: Opener) -> None:
    page = opened()
    page.keyboard.press("Tab")
    assert page.inner_text(":focus") == "Skip to the message"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "message"
    page.focus("#clear")
    page.keyboard.press("/")
    page.keyboard.type("the cat")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("the cat")
    assert page.input_value("#message") == "the cat\nthe cat"
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant:not([aria-busy])")
    page.keyboard.press("Shift+Tab")  # Regenerate
    page.keyboard.press("Shift+Tab")  # Copy
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.className") == "tokens"
    assert page.locator(":focus").evaluate("one => getComputedStyle(one).outlineStyle") != "none"
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator(f"{ANSWER} .token").nth(2).evaluate("one => one.classList.contains('current')")
    assert "token" in page.inner_text("#tip")
    assert "drafter" in page.inner_text("#said")
    page.keyboard.press("Enter")
    assert page.get_attribute("#step-follow", "aria-pressed") == "false"
    page.keyboard.press("Tab")
    assert not page.is_visible("#tip")


def test_live_figures_are_drawn(opened: Opener, llm: LLM) -> None:
    page = opened()
    page.wait_for_selector("#status[data-state=ready]")
    with slowed(llm):
        page.fill("#message", PROMPT)
        page.press("#message", "Enter")
        page.wait_for_selector(".chart:first-child output:text-matches('[1-9]')")
        page.wait_for_selector(".turn.assistant:not([aria-busy])")
    page.wait_for_selector(".bars .bar", state="attached")
    assert page.inner_text("#controller-choice")
    titles = page.locator(".chart figcaption span").all_inner_texts()
    assert titles[:6] == ["Tokens/s", "Tokens per step", "Acceptance by depth, %", "Batch", "Queue", "KV use"]


def test_predicted_and_measured_cost_stand_side_by_side(opened: Opener) -> None:
    page = opened()
    ask(page)
    page.wait_for_selector("#cost-measured:text-matches('^[0-9.]+ m?s$')")
    assert page.inner_text("#cost-predicted") == "–"
    assert "draftwood calibrate" in page.inner_text("#cost-words")
    with page.expect_request("**/live?*") as seen:
        page.reload()
    counts = {"running": 1, "waiting": 0, "max_running": 16, "kv_use": 0, "tokens_per_second": 1, "tokens_per_step": 1}
    live = counts | {"acceptance_by_depth": [], "status": "ready", "controller": None}
    steps = [(0.0121, 0.011), (0.013, 0.012), (0.0121, 0.0242)]
    told = [
        live | {"last_step": {"sequences": 1, "rows": 5, "predicted_seconds": p, "measured_seconds": m}}
        for p, m in steps
    ]
    body = "retry: 600000\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in told)
    page.route(seen.value.url, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.reload()
    page.wait_for_selector("#cost-measured:text-is('24.2 ms')")
    assert page.inner_text("#cost-predicted") == "12.1 ms"
    assert "5 rows, 1 answer" in page.inner_text("#cost-words")
    assert "0.92 times the prediction (median of 3 steps)" in page.inner_text("#cost-words")


def test_a_key_is_asked_for_and_a_server_that_goes_is_missed(chromium: Browser, llm: LLM) -> None:
    with serving(llm, "ngram:shortest=1", api_keys=("secret",)) as locked:
        who: HttpCredentials = {"username": "me", "password": "secret"}
        context = chromium.new_context(http_credentials=who, storage_state=remembering(locked, SHORT))
        page = context.new_page()
        page.goto(locked.url)
        page.wait_for_selector("#status[data-state=ready]")
        ask(page)
        assert tokens(page) > 0
    page.wait_for_selector("#status[data-state=unreachable]")
    ask(page)
    assert "cannot be reached" in page.locator(".turn .error").last.inner_text()
    context.close()
