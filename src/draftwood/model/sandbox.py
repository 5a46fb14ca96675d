"""Jinja's sandbox with a budget: a template from a model folder ends soon, and makes no text that is too long.

The sandbox keeps a template from Python's internals; it does not keep it from `'x' * 10**9` or from nested loops. Here
everything that loops or makes text pays for it before it is done: iterations, calls, operators, filters, containers and
the text itself. The budget grows with the conversation, so that long ones are rendered as any other.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinMethodType, GeneratorType
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_STEP = 256  # what an iteration or a call costs, in characters
_NODE = 16  # what a value that is no text costs
_LOOK = 1 << 18  # units between two looks at the clock
_LONG_LITERAL = 256
_TEXTS = (str, bytes)
_CONTAINERS = (list, tuple, set, frozenset)
_PAID_RESULTS = (str, list, tuple, dict)
_SIZED = (str, bytes, list, tuple, Mapping)
_MOST_NODES = 30_000  # of a template's syntax tree: it takes a second to compile
_DEEPEST_LOOP = 20  # as in Python, which refuses more after compiling for a long time


class Budget:
    """What one rendering may spend, counted in characters made; `given` is the size of the conversation."""

    def __init__(self, given: int) -> None:
        self.largest = (1 << 20) + 8 * given  # of one value
        self._left = (1 << 26) + 128 * given
        self._seconds = 1 + given * 1e-6
        self._until = time.thread_time() + self._seconds  # of this thread alone: other load does not count
        self._next_look = self._left

    def spend(self, amount: int) -> None:
        """Pay for a value of this size, or refuse it."""
        self._left -= amount
        if amount > self.largest:
            raise TemplateError(f"it was stopped: it makes a value of {amount:,} characters")
        if self._left < self._next_look:
            self._look()

    def _look(self) -> None:
        if self._left < 0:
            raise TemplateError("it was stopped: it takes too many steps or makes too much text")
        if time.thread_time() > self._until:
            raise TemplateError(f"it was stopped: it needs more than {self._seconds:.0f} s")
        self._next_look = self._left - _LOOK


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def budget(given: int) -> Iterator[None]:
    """A fresh budget for what is compiled or rendered within."""
    token = _budget.set(Budget(given))
    try:
        yield
    finally:
        _budget.reset(token)


def size_of(value: Any, limit: int) -> int:
    """About how long the value is as text, parts that are shared counted each time; counting stops past `limit`."""
    total, waiting = 0, [value]
    while waiting and total <= limit:
        part = waiting.pop()
        kind = type(part)
        if kind is str:
            total += len(part)
            continue
        total += _NODE
        if kind is dict:
            waiting += part.keys()
            waiting += part.values()
        elif kind is list or kind is tuple:
            waiting += part
        else:
            total += _own_size(part, waiting)
    return total


def _own_size(value: Any, waiting: list[Any]) -> int:
    """What is left of `size_of`, for kinds that are rare; parts are put where they wait."""
    if isinstance(value, int):
        return value.bit_length() // 3
    if isinstance(value, Mapping):
        waiting += (*value.keys(), *value.values())
    elif isinstance(value, Namespace):
        waiting += getattr(value, "_Namespace__attrs").values()  # noqa: B009 - Jinja offers no other way to them
    elif isinstance(value, _CONTAINERS):
        waiting += value
    return len(value) if isinstance(value, _TEXTS) else 0


def _pay_for(value: Any) -> Any:
    current = _budget.get()
    current.spend(len(value) if type(value) is str else size_of(value, current.largest))
    return value


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, in which everything is paid for from the current `budget`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_pay_for, **options)
        del self.globals["lipsum"]  # writes any amount of Latin
        self.filters |= {name: _metered(function, name) for name, function in self.filters.items()}
        self.filters |= {"tojson": _to_json, _PAID: _paid, _SLICED: _sliced, _STEPS: _steps}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that can make long values."""
        _budget.get().spend(_OPERATORS[operator](left, right))
        return self.binop_table[operator](left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Calls of macros, helpers and methods."""
        current = _budget.get()
        current.spend(_STEP)
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
        if isinstance(method, BuiltinMethodType) and method.__self__ is not None:
            args = tuple(list(arg) if isinstance(arg, GeneratorType) else arg for arg in args)
            current.spend(_growth(method.__name__, method.__self__, [*args, *options.values()]))
        result = super().call(context, function, *args, **options)
        return _pay_for(result) if isinstance(result, _PAID_RESULTS) else result

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        if sum(1 for _ in source.find_all(nodes.Node)) > _MOST_NODES:
            raise TemplateError(f"it has more than {_MOST_NODES:,} parts")
        metered = _Meter().visit(source).set_lineno(1, override=False).set_environment(self)
        return super()._generate(metered, *args, **options)


def _metered(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own argument comes before the value

    @functools.wraps(function)
    def filtered(*args: Any, **options: Any) -> Any:
        args = tuple(list(arg) if isinstance(arg, GeneratorType) else arg for arg in args)
        value, others = args[first], [*args[first + 1 :], *options.values()]
        current = _budget.get()
        current.spend(_STEP + _growth(name, value, others))
        result = function(*args, **options)
        if isinstance(result, GeneratorType):
            return _counted(result)
        return _pay_for(result) if isinstance(result, _PAID_RESULTS) else result

    return filtered


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _budget.get().spend(_STEP)
        yield value


def _growth(name: str, value: Any, others: Sequence[Any]) -> int:
    """Characters that a method or filter of this name makes, or reads, at most."""
    grows = _GROWTH.get(name)
    return grows(value, others) if grows else _length(value)


def _length(value: Any) -> int:
    """Without its parts."""
    return len(value) if isinstance(value, _SIZED) else _NODE


def _widest(numbers: Iterable[Any]) -> int:
    return max((abs(number) for number in numbers if isinstance(number, int)), default=0)


def _padded(value: Any, others: Sequence[Any]) -> int:
    return _length(value) + _widest(others)


def _tabs(value: Any, others: Sequence[Any]) -> int:
    tabs = value.count("\t") if isinstance(value, str) else value.count(b"\t")
    return len(value) + tabs * max(8, _widest(others))


def _joined(value: Any, others: Sequence[Any]) -> int:
    """For `separator.join(parts)` and for `parts | join(separator)`."""
    every = [value, *others]
    parts = [part for part in every if not isinstance(part, _TEXTS)]
    count = max((_length(part) for part in every), default=0)
    separators = sum(_length(part) for part in every if isinstance(part, _TEXTS))
    return size_of(parts, _budget.get().largest) + count * separators


def _replaced(value: Any, others: Sequence[Any]) -> int:
    texts = [str(part) if not isinstance(part, bytes) else part for part in (value, *others[:2])]
    if len(texts) < 3 or len({type(text) for text in texts}) > 1:
        return _length(value)  # it will be refused
    text, old, new = texts
    return len(text) + text.count(old) * len(new)  # type: ignore[arg-type]


def _translated(value: Any, others: Sequence[Any]) -> int:
    return _length(value) * size_of(others, _budget.get().largest)


def _indented(value: Any, others: Sequence[Any]) -> int:
    text = str(value)
    width = max(_widest(others), *(_length(other) for other in others if isinstance(other, str)), 4)
    return len(text) + (1 + len(text.splitlines())) * width


def _filled(value: Any, others: Sequence[Any]) -> int:
    return _length(value) + (1 + _widest(others)) * size_of(others, _budget.get().largest)


def _slow(value: Any, others: Sequence[Any]) -> int:
    largest = _budget.get().largest
    return 32 * size_of(value, largest) + _length(value) * size_of(others, largest)


def _power_of_ten(value: Any, others: Sequence[Any]) -> int:
    return _widest(others) ** 2


_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\d+|\*)?(?:\.(\d+|\*))?")
_FIELD = re.compile(r"\{[^{}]*[:!]([^{}]*)(\{)?")


def _percent(value: Any, others: Sequence[Any]) -> int:
    """For `text % values` and `text | format(values)`."""
    widths = [width for found in _PERCENT.findall(str(value)) for width in found if width]
    return _formatted(value, widths, others, given="*" in widths)


def _braces(value: Any, others: Sequence[Any]) -> int:
    fields = _FIELD.findall(str(value))
    widths = [width for spec, _ in fields for width in re.findall(r"\d+", spec)]
    return _formatted(value, widths, others, given=any(nested for _, nested in fields))


def _formatted(value: Any, widths: Sequence[str], others: Sequence[Any], *, given: bool) -> int:
    """`given`: widths are among the values."""
    text, largest = str(value), _budget.get().largest
    stated = sum(int(width[:18]) for width in widths if width != "*")
    fields = text.count("%") + text.count("{")
    values = _widest(_flat(others)) if given else 0
    return len(text) + stated + fields * (values + size_of(others, largest))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


_GROWTH: dict[str, Callable[[Any, Sequence[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes"), _padded),
    **dict.fromkeys(("batch", "slice"), _filled),
    **dict.fromkeys(("pprint", "striptags", "title", "urlize", "wordcount", "wordwrap"), _slow),
    "expandtabs": _tabs,
    "format": lambda value, others: max(_percent(value, others), _braces(value, others)),
    "format_map": _braces,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _power_of_ten,
    "translate": _translated,
}


def _plus(left: Any, right: Any) -> int:
    if type(left) is str and type(right) is str:
        return len(left) + len(right)
    return size_of((left, right), _budget.get().largest)


def _times(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _NODE + left.bit_length() + right.bit_length()
    number, other = (left, right) if isinstance(left, int) else (right, left)
    return size_of(other, _budget.get().largest) * max(number, 1) if isinstance(number, int) else _NODE


def _power(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _NODE + left.bit_length() * abs(right) * 8  # long products take longer than long texts
    return _NODE


def _modulo(left: Any, right: Any) -> int:
    return _percent(left, [right]) if isinstance(left, _TEXTS) else _NODE


_OPERATORS: dict[str, Callable[[Any, Any], int]] = {"+": _plus, "*": _times, "**": _power, "%": _modulo}


def _to_json(value: Any, indent: int | str | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """As `json.dumps`: Jinja's own filter escapes HTML, which no model was trained on."""
    current = _budget.get()
    current.spend(size_of(value, current.largest))
    if indent is None:
        return _pay_for(json.dumps(value, ensure_ascii=ensure_ascii, **options))
    current.spend(len(indent) if isinstance(indent, str) else indent)
    chunks: list[str] = []
    encoder = json.JSONEncoder(indent=indent, ensure_ascii=ensure_ascii, **options)
    length = 0
    for chunk in encoder.iterencode(value):
        length += len(chunk)
        current.spend(len(chunk))
        if length > current.largest:
            raise TemplateError(f"it was stopped: it makes a value of more than {length:,} characters")
        chunks.append(chunk)
    return "".join(chunks)


# Filters that `_Meter` puts into a template. The spaces keep a template from naming them; Jinja computes a filter on a
# constant once, when it compiles, unless the filter asks for the context.
_PAID, _SLICED, _STEPS = "paid for", "paid by length", "some steps"


@pass_context
def _paid(context: Context, value: Any) -> Any:
    return _pay_for(value)


@pass_context
def _sliced(context: Context, value: Any) -> Any:
    _budget.get().spend(_length(value))
    return value


@pass_context
def _steps(context: Context, amount: int) -> bool:
    _budget.get().spend(amount)
    return True


def _pays(amount: int) -> nodes.Expr:
    return nodes.Filter(nodes.Const(amount), _STEPS, [], [], None, None)


def _is_constant(node: nodes.Expr) -> bool:
    try:
        node.as_const()
    except nodes.Impossible:
        return False
    return True


class _Meter(NodeTransformer):
    """Makes iterations, containers, slices, joined and literal text pay; Jinja has hooks for the rest."""

    def __init__(self) -> None:
        self._loops = 0  # around the node that is visited

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._loops += 1
        if self._loops > _DEEPEST_LOOP:
            raise TemplateError(f"it nests more than {_DEEPEST_LOOP} loops")
        self.generic_visit(node)
        self._loops -= 1
        node.body.insert(0, nodes.ExprStmt(_pays(_STEP)))
        if node.test is not None:
            node.test = nodes.And(_pays(_STEP), node.test)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node | list[nodes.Node]:
        self.generic_visit(node)
        literal = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        return [nodes.ExprStmt(_pays(literal)), node] if literal > _LONG_LITERAL else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [part if isinstance(part, nodes.Const) else _paid_node(part) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _paid_node(node, _SLICED) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        if _is_constant(node):
            return node
        self.generic_visit(node)
        return _paid_node(node)

    visit_Dict = visit_List


def _paid_node(node: nodes.Expr, by: str = _PAID) -> nodes.Expr:
    return nodes.Filter(node, by, [], [], None, None)
