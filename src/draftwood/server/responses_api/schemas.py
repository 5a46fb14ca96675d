"""What `/v1/responses` takes and gives. Fields that chat completions have too are inherited from `Sampling`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from draftwood.server.schemas import MAX_ITEMS, ContentPart, Count, Open, Prediction, Sampling, few_keys

LOGPROBS = "message.output_text.logprobs"  # the only thing of `include` that can be given here

MAX_METADATA = 16  # keys, as OpenAI's
Name = Annotated[str, Field(max_length=256)]


def _text_or_items(value: Any) -> str:
    return "text" if isinstance(value, str) else "items"


# Which of the two is meant is decided before either is checked, so that an error speaks of that one only.
Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[ContentPart], Field(max_length=MAX_ITEMS, fail_fast=True), Tag("items")],
    Discriminator(_text_or_items),
]


class InputMessage(Open):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class InputCall(Open):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class InputCallOutput(Open):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content


class OtherItem(Open):
    """Any other item: `reasoning` is passed over, the rest is refused by its type."""

    type: Name


KNOWN_ITEMS = ("message", "function_call", "function_call_output")


def _kind_of(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return kind if kind in KNOWN_ITEMS else "other"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of),
]
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("items")],
    Discriminator(_text_or_items),
]


class TextFormat(Open):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Open):
    """How the text is written."""

    format: TextFormat | None = None


class FlatTool(Open):
    """A tool; only those of type `function` are offered."""

    type: Name
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(Open):
    """Exactly this tool."""

    type: Name
    name: Name | None = None


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    few_keys(MAX_METADATA),
]


class ResponsesRequest(Sampling):
    """A conversation to answer, as the Responses API writes it."""

    input: Input
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Count | None = None
    tools: Annotated[list[FlatTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[Name], Field(max_length=32, fail_fast=True)] | None = Field(
        None,
        description=f"`{LOGPROBS}` is given; what else can be named here never occurs in an answer of this server.",
    )
    metadata: Metadata | None = None
    prediction: Prediction | None = None
    store: bool | None = Field(None, description="Accepted, but nothing is stored: the answer says `store: false`.")
    background: bool | None = Field(None, description="Only false.")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="Only `disabled`.")
    previous_response_id: Name | None = Field(None, description="Refused: responses are not stored.")

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are part of the answer."""
        return LOGPROBS in (self.include or ())


class OutputMessage(Open):
    """What the model said."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[dict[str, Any]]


class OutputCall(Open):
    """A call the model made."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class ResponseUsage(Open):
    """What a response took."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    reproducible: bool  # whether the same seed gives the same answer again


class ResponseObject(Open):
    """An answer to a conversation."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputMessage | OutputCall]
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage
    store: Literal[False]
