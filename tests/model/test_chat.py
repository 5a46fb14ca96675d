from __future__ import annotations

import random
import resource
import time
from typing import Any

import pytest
from transformers import GPT2Tokenizer

from draftwood.errors import TokenizerError
from draftwood.model import chat

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
DOUBLED = "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = "
NESTED = "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}"
SHARED = "{% set a = ['x', 'x'] %}" + "".join("{% set a = [a, a, messages] %}" for _ in range(60))
BOMBS = {
    "range": "{% for i in range(1000000000) %}x{% endfor %}",
    "loop": NESTED + "x" + "{% endfor %}" * 3,
    "empty loop": NESTED + "{% endfor %}" * 3,
    "filtered loop": NESTED.replace("b in range(90000)", "b in range(90000) if false") + "{% endfor %}" * 3,
    "long literal": "{% for i in range(90000) %}" + "x" * 90_000 + "{% endfor %}",
    "block set": "{% for i in range(90000) %}{% set x %}" + "x" * 90_000 + "{% endset %}{% endfor %}",
    "recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "times": "{{ 'x' * 10000000000 }}",
    "times of a list": "{{ ([0] * 10000000000) | length }}",
    "times from the left": "{{ 10000000000 * 'x' }}",
    "plus": DOUBLED + "ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "tilde": DOUBLED + "ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "long tilde": "{% set s = 'x' * 900000 %}{{ (" + " ~ ".join(["s"] * 400) + ") | length }}",
    "slices": "{% set s = 'x' * 900000 %}" + "".join(f"{{% set s{i} = s[1:] %}}" for i in range(1000)),
    "power": "{{ 10 ** 10000000000 }}",
    "product": "{% set ns = namespace(n=99) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent precision": "{{ '%.10000000000f' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format width": "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "format map": "{{ '{a:{w}}'.format_map({'a': 1, 'w': 10000000000}) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "center": "{{ 'x'.center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ 'x'.zfill(10000000000) }}",
    "bytes": "{{ 'x'.encode().rjust(10000000000) }}",
    "to_bytes": "{{ (1).to_bytes(10000000000, 'little') }}",
    "expandtabs": "{{ '\t\t'.expandtabs(1000000000) }}",
    "translate": "{% set s = 'x' * 900000 %}{{ s.translate({120: s}) }}",
    "join": "{% set s = 'x' * 900000 %}{{ s.join(s) }}",
    "replace": "{% set s = 'x' * 900000 %}{{ s.replace('x', s) }}",
    "replace nothing": "{% set s = 'x' * 900000 %}{{ s.replace('', s) }}",
    "center filter": "{{ 'x' | center(10000000000) }}",
    "center of messages": "{{ messages | map('center', 900000) | list | length }}" * 90,
    "indent filter": "{% set s = '\n' * 90000 %}{{ s | indent(1000000, true, true) }}",
    "indent by text": "{% set s = '\n' * 90000 %}{{ s | indent(s) }}",
    "join filter": "{% set s = 'x' * 900000 %}{{ s | join(s) }}",
    "replace filter": "{% set s = 'x' * 900000 %}{{ s | replace('x', s) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "slice": "{{ [1] | slice(10000000000, 0) | list }}",
    "round": "{{ 1 | round(1000000000, 'floor') }}",
    "wordwrap": "{% set s = 'x y ' * 90000 %}{{ s | wordwrap(1, true, s) }}",
    "maps": "{{ range(90000)" + " | map('string')" * 9000 + " | list | length }}",
    "tojson": SHARED + "{{ a | tojson }}",
    "tojson indent": "{{ messages | tojson(indent=10000000000) }}",
    "text of lists": SHARED + "{{ a }}",
    "comparison": SHARED + SHARED.replace("set a", "set b").replace("[a, a", "[b, b") + "{{ a == b }}",
    "text of namespaces": "{% set a = namespace(x=1) %}" + "{% set a = namespace(x=a, y=a) %}" * 60 + "{{ a }}",
    "dictionaries": "{% set a = dict(x=1) %}" + "{% set a = dict(x=a, y=a) %}" * 60 + "{{ a == a | list }}{{ a }}",
    "lipsum": "{{ lipsum(1000000000) }}",
    "filter block": "{% filter center(10000000000) %}x{% endfilter %}",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "nested loops": "{% for i in [1] %}" * 200 + "{% endfor %}" * 200,
    "long template": "x" * 1_000_000,
    "include": "{% include 'x' %}",
}  # fmt: skip


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS.keys())
def test_a_template_that_runs_on_is_stopped(template: str) -> None:
    started, memory = time.thread_time(), peak_memory()
    with pytest.raises(TokenizerError, match="chat template"):
        chat.render(template, MESSAGES, {}, add_generation_prompt=True)
    assert time.thread_time() - started < 4
    assert peak_memory() - memory < 400e6


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": " What is 2 + 2? "},
    {
        "role": "assistant",
        "content": "<think>\nEasy.\n</think>\n\nI will look.",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [2, "é"]}}}],
    },
    {"role": "tool", "content": "4", "name": "add"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <numbers>.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
        },
    }
]
# In the style of published families: what they use of Jinja, in our own words.
FAMILIES = {
    "llama3": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if strftime_now is defined %}{%- set date = strftime_now("%Y") %}{%- else %}{%- set date = "2024" %}{%- endif %}
{{- "<|start|>system<|end|>\n\n" + "Year: " + date + "\n\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}{%- endif %}
{{- system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- for name, value in call.arguments | items %}{{- name + '=' ~ value }}{%- if not loop.last %}, {% endif %}
        {%- endfor %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}
    {%- else %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}""",
    "qwen3": """{%- set ns = namespace(multi_step=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string
        and not (message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{{- ns.last }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {{- '<think>\n' + thought.strip('\n') + '\n</think>\n' }}
    {%- endif %}
    {%- if loop.first or loop.previtem.role != message.role %}{{- '<|im_start|>' + message.role }}{%- endif %}
    {{- '\n' + content + '<|im_end|>\n' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{- loop.index ~ '/' ~ loop.length }}{%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}""",
    "mistral": """{%- set loop_messages = messages if messages[0].role != 'system' else messages[1:] %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- for message in loop_messages | rejectattr("role", "equalto", "tool") %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) and false %}{{ raise_exception('alternate') }}{% endif %}
{%- if tools is not none and (message == user_messages[-1]) %}{{- "[TOOLS] [" }}
{%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != "return" %}
{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
{%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- "}}" }}{%- endfor %}{{- "] " }}{%- endif %}
{{- message.role | upper ~ ": " ~ message.content | replace("\n", " ") }}
{%- endfor %}{{ messages | map(attribute='role') | unique | join(', ') }}""",
    "gemma": """{{ bos_token }}{% macro turn(role, text) -%}
<start_of_turn>{{ role }}
{{ text | trim }}<end_of_turn>{{ caller() if caller }}
{% endmacro %}
{% for message in messages %}
    {% if message.role == "assistant" %}{% set role = "model" %}{% else %}{% set role = message.role %}{% endif %}
{{ turn(role, message.content) }}{% generation %}{{ '%s-%03d' % (role, loop.index) }}{% endgeneration %}
    {% if loop.index > 4 %}{% break %}{% endif %}{% if role == "tool" %}{% continue %}{% endif %}
{{ {"role": role, "n": [loop.index, loop.index * 2]} | tojson }} {{ "{}:{:>4}".format(role, loop.index) }}
{% endfor %}{{ [1, 2] + [3] }} {{ (messages[0].keys() | list + ['x']) | sort }} {{ 'ab' * 3 }} {{ 7 // 2 ** 2 }}""",
    "phi": """{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}
{%- set block %}captured {{ messages[0].content }}{% endset %}{{ block | indent(4, true) }}
{{- none }}{{ undefined_thing }}
{%- for row in [1, 2, 3, 4, 5] | batch(2, '-') %}{{ row | join(' ') }};{% endfor %}
{%- for g in messages | groupby('role') %}{{ g.grouper }}={{ g.list | length }} {% endfor %}
{{- messages | map(attribute='content') | map('length') | sum }}{{ 3.14159 | round(2) }}{{ 'a b' | title }}""",
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("template", FAMILIES.values(), ids=FAMILIES.keys())
def test_templates_of_known_families_render_as_transformers_renders_them(
    template: str, tools: list[dict[str, Any]] | None
) -> None:
    theirs = GPT2Tokenizer(vocab={"<s>": 0}, merges=[], bos_token="<s>")
    expected = theirs.apply_chat_template(
        CONVERSATION,
        tools=None if tools is None else [*tools],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    special = {"bos_token": "<s>"}
    assert chat.render(template, CONVERSATION, special, add_generation_prompt=True, tools=tools) == expected


@pytest.mark.parametrize(
    "conversation",
    [
        [{"role": "user", "content": "x" * 7_000_000}],
        [{"role": "user" if i % 2 else "assistant", "content": f"message {i}"} for i in range(4000)],
    ],
    ids=["long", "many"],
)
@pytest.mark.parametrize("family", ["llama3", "qwen3", "phi"])
def test_long_conversations_have_a_budget_to_match(conversation: list[dict[str, Any]], family: str) -> None:
    prompt = chat.render(FAMILIES[family], conversation, {"bos_token": ""}, add_generation_prompt=True)
    assert len(prompt) > sum(len(message["content"]) for message in conversation)


def test_mutated_templates_fail_in_one_way_only() -> None:
    rng = random.Random(0)
    pieces = [*FAMILIES.values(), *(bomb for bomb in BOMBS.values() if len(bomb) < 300)]
    rendered = 0
    for _ in range(250):
        template = list(rng.choice(pieces))
        for _ in range(rng.randrange(1, 6)):
            start, other = rng.randrange(len(template) + 1), rng.choice(pieces)
            cut = rng.randrange(len(other))
            template[start : start + rng.randrange(4)] = other[cut : cut + rng.randrange(12)]
        try:
            rendered += isinstance(chat.render("".join(template), CONVERSATION, {}, add_generation_prompt=True), str)
        except TokenizerError:
            continue
    assert rendered
