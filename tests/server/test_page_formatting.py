"""Answers on the page formatted as Markdown: what is formatted, what stays text, and what is still known of each token.

The server's answers are made up here, so that they say what a test needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from draftwood.server.files import FOLDER
from serving import Serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Json = dict[str, Any]

RENDER = """async (text) => {
    const { Formatted } = await import("/page/formatted.js");
    const element = document.createElement("div");
    new Formatted(element).update(text);
    element.querySelectorAll("figcaption").forEach(one => one.remove());
    return element.innerHTML;
}"""

LINK = '<a href="{0}" title="{0}" rel="noopener noreferrer nofollow" target="_blank">{1}</a>'
FORMATTED = {
    "# One\n###### Six #": "<h4>One</h4><h6>Six</h6>",
    "a *b* **c** ***d*** _e_ __f__ ~~g~~": (
        "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <em>e</em> <strong>f</strong> <s>g</s></p>"
    ),
    "snake_case_name, 2 * 3 * 4, **open": "<p>snake_case_name, 2 * 3 * 4, **open</p>",
    "**a *b* c** and `**code**`": "<p><strong>a <em>b</em> c</strong> and <code>**code**</code></p>",
    r"\*text\* `` a`b ``": "<p>*text* <code>a`b</code></p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "- a\n- b\n  1. c\n  2. d\n\nend": (
        '<ul><li><p>a</p></li><li><p>b</p><ol start="1"><li><p>c</p></li><li><p>d</p></li></ol></li></ul><p>end</p>'
    ),
    "text\n3. not a list\n1. a list": '<p>text\n3. not a list</p><ol start="1"><li><p>a list</p></li></ol>',
    "```python\nif a < b:\n    *c*\n```\nafter": (
        '<figure class="code" aria-label="Code: python"><pre><code>if a &lt; b:\n    *c*</code></pre></figure>'
        "<p>after</p>"
    ),
    "~~~\n```": '<figure class="code" aria-label="Code"><pre><code>```</code></pre></figure>',
    "> a\n> > b\n\n---": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><hr>",
    "[*a*](https://a.example/x) <mailto:me@a.example> https://b.example.": "<p>"
    + LINK.format("https://a.example/x", "<em>a</em>")
    + " "
    + LINK.format("mailto:me@a.example", "mailto:me@a.example")
    + " "
    + LINK.format("https://b.example/", "https://b.example")
    + ".</p>",
}

HOSTILE = [
    "<script>window.hurt = 1</script>",
    "<img src=x onerror='window.hurt = 1'>",
    "<svg/onload=window.hurt=1>",
    "<iframe srcdoc='<script>parent.hurt=1</script>'></iframe>",
    "[a](javascript:window.hurt=1)",
    "[b](JaVaScRiPt&colon;window.hurt=1)",
    "[c](java\tscript:window.hurt=1)",
    "[d](<javascript:window.hurt=1>)",
    "[e](data:text/html,<script>window.hurt=1</script>)",
    "[f](vbscript:x)",
    "[g](//elsewhere.example/x)",
    "[h](/manage/drain)",
    "<javascript:window.hurt=1>",
    "![i](https://elsewhere.example/i.png)",
    '[j](https://a.example/"onmouseover="window.hurt=1)',
    "**<b onclick='window.hurt=1'>[k](javascript:window.hurt=1)</b>**",
    "# <script>window.hurt = 1</script>",
    '- `<img src=x onerror="window.hurt=1">`',
    "```<script>window.hurt=1</script>\n</code></pre><script>window.hurt = 1</script>\n```",
]
SAFE = """element => ({
    tags: [...new Set([...element.querySelectorAll("*")].map(one => one.localName))].sort(),
    attributes: [...new Set([...element.querySelectorAll("*")].flatMap(one => one.getAttributeNames()))].sort(),
    links: [...element.querySelectorAll("a")].map(one => [new URL(one.href).protocol, one.rel]),
})"""
TAGS = {
    *("p", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "figure", "figcaption", "pre", "code", "button"),
    *("a", "span", "em", "strong", "s"),
}
ATTRIBUTES = {"class", "start", "href", "title", "rel", "target", "type", "aria-label", "data-kind", "data-mark"}


@pytest.fixture
def page(chromium: Browser, served: Serving) -> Iterator[Page]:
    context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
    made = context.new_page()
    made.set_default_timeout(10_000)
    made.on("dialog", lambda dialog: pytest.fail(dialog.message))
    made.goto(served.url)
    made.wait_for_selector("#law option[value=walk]", state="attached")
    yield made
    context.close()


def emitted(text: str, kind: str = "plain", node: int | None = None) -> Json:
    return {"token": 7, "text": text, "kind": kind, "depth": 1, "node": node, "p": 0.5, "q": None}


def step(number: int, tokens: Sequence[Json], tree: Json | None = None) -> Json:
    fields = {"choice": 0, "seconds": 0.01, "drafter": "ngram", "law": "match", "batch": 1, "rows": 1}
    return fields | {"step": number, "tree": tree, "emitted": list(tokens)}


def plain_steps(text: str, size: int = 3) -> list[Json]:
    """One token every `size` characters, wherever that is in the Markdown."""
    return [step(i + 1, [emitted(text[i * size : (i + 1) * size])]) for i in range(-(-len(text) // size))]


def answers_with(page: Page, steps: Sequence[Json]) -> None:
    """Whatever is asked, the answer has these steps, one chunk each."""

    def chunk(told: Json) -> str:
        content = "".join(token["text"] for token in told["emitted"])
        return json.dumps({"choices": [{"delta": {"content": content}, "finish_reason": None}], "trace": [told]})

    body = "".join(f"data: {data}\n\n" for data in [*map(chunk, steps), "[DONE]"])
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream; charset=utf-8", body=body),
    )


def ask(page: Page, text: str = "anything") -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")
    page.wait_for_selector(".turn.assistant:last-child:not([aria-busy])")


def test_no_module_of_the_page_makes_markup_from_strings() -> None:
    for path in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", path.read_text()
        )


@pytest.mark.parametrize("text", FORMATTED)
def test_markdown_becomes_elements(blank: Page, text: str) -> None:
    assert blank.evaluate(RENDER, text) == FORMATTED[text]


def test_a_text_that_grows_looks_like_one_that_was_whole(blank: Page) -> None:
    different = blank.evaluate(
        """async (text) => {
            const { Formatted } = await import("/page/formatted.js");
            const draw = (act) => {
                const element = document.createElement("div");
                act(new Formatted(element));
                return element.innerHTML;
            };
            const grown = draw(one => {
                for (let i = 0; i <= text.length; i += 1) one.update(text.slice(0, i));
                one.finish(text);
            });
            return grown === draw(one => one.update(text)) ? null : grown;
        }""",
        "\n\n".join(FORMATTED),
    )
    assert different is None


@pytest.mark.parametrize(
    "unit",
    ["[", "*a ", "**a ", "> ", "- ", "`", "[a](", '[a](b "', "_a", "[a](javascript:x) ", "# ", "\\", "~~a ", "<h"],
)
def test_no_text_keeps_the_page_busy(blank: Page, unit: str) -> None:
    """Twenty thousand characters: quadratic time in small units would take seconds."""
    took = blank.evaluate(
        """async (text) => {
            const { blocks, Passage } = await import("/page/markdown.js");
            const began = performance.now();
            blocks(Passage.of(text));
            return performance.now() - began;
        }""",
        unit * (20_000 // len(unit)),
    )
    assert took < 2000


def test_markup_in_answers_and_questions_does_nothing(page: Page) -> None:
    text = "\n\n".join(HOSTILE)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answers_with(page, plain_steps(text))
    ask(page, text)
    for again in (False, True):
        if again:
            page.reload()  # what was kept is no safer than what came
        for turn in (".turn.user .tokens", ".turn.assistant .tokens"):
            seen = page.locator(turn).evaluate(SAFE)
            assert set(seen["tags"]) <= TAGS, turn
            assert set(seen["attributes"]) <= ATTRIBUTES, turn
            # Addresses inside of pictures and quotes may be links, but nothing that runs.
            assert {protocol for protocol, _ in seen["links"]} == {"https:"}
            assert {rel for _, rel in seen["links"]} == {"noopener noreferrer nofollow"}
            shown = page.inner_text(turn)
            for words in (
                "<script>window.hurt = 1</script>",
                "<img src=x onerror='window.hurt = 1'>",
                "![i](",
                "[a](java",
            ):
                assert words in shown
    assert page.evaluate("window.hurt") is None
    assert not [url for url in asked if "elsewhere" in url or "manage" in url]


def test_tokens_stay_marked_in_formatted_text(page: Page) -> None:
    tokens = ["So **", "very", " good**", ":\n", "```", "py\n", "x = ", "1\n```\n", "Done"]
    kinds = ["plain", "accepted", "bonus", "plain", "plain", "plain", "accepted", "correction", "plain"]
    answers_with(page, [step(i + 1, [emitted(*pair)]) for i, pair in enumerate(zip(tokens, kinds, strict=True))])
    ask(page)
    drawn = page.locator(".turn.assistant .token").evaluate_all(
        "all => all.map(one => [Number(one.dataset.mark), one.dataset.kind, one.textContent])"
    )
    assert [(mark, text) for mark, _, text in drawn] == [
        (0, "So "), (1, "very"), (2, " good"), (3, ":"), (6, "x = "), (7, "1"), (8, "Done"),
    ]  # fmt: skip
    assert all(kind == kinds[mark] for mark, kind, _ in drawn)
    assert page.inner_text(".turn.assistant strong") == "very good"
    page.locator("pre .token").first.hover()
    assert re.search(r"accepted guess.*step\s+7", page.inner_text("#tip"), re.DOTALL)
    page.locator("pre .token").first.click()
    assert page.inner_text("#step-place") == "7 / 9"
    page.focus(".turn.assistant .tokens")
    keys = ["Home", *["ArrowRight"] * 4, "ArrowLeft", "End"]
    # Tokens that are only format are passed over.
    for key, expected in zip(keys, ("So ", "very", " good", ":", "x = ", ":", "Done"), strict=True):
        page.keyboard.press(key)
        assert page.locator(".turn.assistant .current").evaluate("one => one.textContent") == expected


def test_long_lines_and_rejected_guesses_fit_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    tree = {
        "tokens": [1, 2, 3],
        "texts": ["a", "w" * 60, "v" * 60],
        "parents": [-1, 0, 0],
        "p": [None, 0.5, 0.5],
        "q": [None] * 3,
        "accepted": [True, False, False],
    }
    text = f"# {'h' * 90}\n\n- {'i' * 90}\n  > `{'c' * 90}`\n\n```\n{'x' * 200}\n```\n\n[{'l' * 90}](https://a.example)"
    answers_with(page, [*plain_steps(text, 25), step(99, [emitted("b", "correction")], tree)])
    page.evaluate("document.getElementById('rejected').click()")
    ask(page, text)
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert page.evaluate("(m => m.scrollWidth - m.clientWidth)(document.getElementById('messages'))") <= 0
    assert page.evaluate("(one => one.scrollWidth - one.clientWidth)(document.querySelector('pre'))") > 0, (
        "code scrolls"
    )


def test_code_is_monospaced_and_can_be_copied(page: Page) -> None:
    code = "def f(x):\n    return x < 1"
    answers_with(page, plain_steps(f"Look:\n\n```python\n{code}\n```\n"))
    ask(page)
    font = "one => getComputedStyle(one).fontFamily"
    assert "mono" in page.locator(".turn.assistant pre .token").first.evaluate(font)
    assert "mono" not in page.locator(".turn.assistant p .token").first.evaluate(font)
    page.focus(".turn.assistant .tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    assert page.inner_text(":focus") == "Copy code"
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == code


def test_text_can_be_seen_as_it_came_and_that_is_remembered(page: Page) -> None:
    text = "# Title\n\nSome *words*"
    answers_with(page, plain_steps(text))
    ask(page, text)
    assert page.inner_text(".turn.assistant h4") == "Title"
    page.uncheck("#formatted")
    for _ in range(2):
        for turn in (".turn.user .tokens", ".turn.assistant .tokens"):
            assert page.locator(turn).evaluate("one => one.textContent") == text
        assert page.locator(".turn h4").count() == 0
        page.reload()
    page.check("#formatted")
    assert page.locator(".turn h4").count() == 2


def test_rejected_guesses_are_shown_on_demand(page: Page) -> None:
    tree = {
        "tokens": [1, 2, 3, 4, 5, 6],
        "texts": ["The", " cat", " dog", " sat", " ran", " off"],
        "parents": [-1, 0, 0, 1, 1, 4],
        "p": [None, 0.5, 0.5, 0.5, 0.5, 0.5],
        "q": [None] * 6,
        "accepted": [True, True, False, False, False, False],
    }
    guessed = step(2, [emitted(" cat", "accepted", 1), emitted(" lay", "correction")], tree)
    answers_with(page, [step(1, [emitted("The")]), guessed])
    ask(page)
    shown = "one => getComputedStyle(one, '::before').content"
    accepted, correction = (page.locator(f".turn.assistant [data-kind={kind}]") for kind in ("accepted", "correction"))
    assert accepted.evaluate(shown) == correction.evaluate(shown) == "none"
    page.check("#rejected")
    assert accepted.evaluate(shown) == '"·dog"'
    assert correction.evaluate(shown) == '"·sat ¦ ·ran·off"'
    assert page.locator(".turn.assistant .tokens").evaluate("one => one.textContent") == "The cat lay"
    assert page.is_visible(".rejected-legend")
    correction.hover()
    assert "·sat ¦ ·ran·off" in page.inner_text("#tip")  # and to those who do not see the text
    page.reload()
    assert page.locator(".turn.assistant [data-kind=correction]").evaluate(shown) == '"·sat ¦ ·ran·off"'
    page.uncheck("#rejected")
    assert page.locator(".turn.assistant [data-kind=correction]").evaluate(shown) == "none"
