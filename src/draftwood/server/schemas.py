"""What clients may send. Unknown fields are accepted, as OpenAI's servers accept them; known ones are checked.

Validation stops at the first wrong item of a list, and lists and tables have limits: a request that is wrong in a
million places must not cost more than one that is wrong in one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from draftwood.request import MOST_PRIORITY

T = TypeVar("T")
INT64 = 1 << 63
MAX_ITEMS = 16_384  # of a list of messages, of parts or of texts
MAX_KEYS = 1024  # of a table
Items = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
Few = Annotated[list[T], Field(max_length=64, fail_fast=True)]


def few_keys(most: int) -> BeforeValidator:
    """Refuse a larger table before each of its keys is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} keys are allowed")
        return value

    return BeforeValidator(check)


FewKeys = few_keys(MAX_KEYS)
Seed = Annotated[int, Field(ge=-INT64, lt=INT64)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Alternatives = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024, fail_fast=True)
]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class Open(BaseModel):
    """Takes whatever else is there."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Open):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


class Speculation(BaseModel):
    """How one request is speculated for; what it does not say is as the server was started."""

    model_config = ConfigDict(extra="forbid")  # a misspelt wish would be silently ignored

    enabled: bool = True
    drafter: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="One of the drafters the server offers; see /v1/models."
    )
    law: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="An acceptance law, such as match or block; see `draftwood laws --list`."
    )
    max_nodes: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(None, description="Draft nodes a step, at most.")
    depth: Count | None = Field(None, description="Draft tokens one behind the other, at most.")
    report: Literal["none", "summary", "detailed", "trace"] = Field(
        "none",
        description="Acceptance figures in `metrics.speculative_decoding` of the answer; with `trace` also every step, "
        "in `trace` of the chunks of a stream or in `metrics.trace` of a whole answer.",
    )


Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Promise(BaseModel):
    """What one request is promised: service-level objectives."""

    model_config = ConfigDict(extra="forbid")

    ttft_ms: Milliseconds | None = Field(None, description="From arrival to the first token.")
    tpot_ms: Milliseconds | None = Field(None, description="For each token behind it, on average over the answer.")


class StructuredOutputs(Open):
    """vLLM's way to say what an answer has to be; one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Annotated[str, Field(max_length=MAX_ITEMS)] | None = None
    choice: Alternatives | None = None
    grammar: Annotated[str, Field(max_length=1 << 18)] | None = None


class Sampling(Open):
    """What all answers have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_KEYS), FewKeys] | None = None
    bad_words: Few[StopText] | None = None
    stop: StopText | Few[StopText] | None = None
    stop_token_ids: Few[TokenId] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    speculation: Annotated[Speculation, FewKeys] | None = None
    slo: Promise | None = Field(None, description="Steps are sized to keep it first; see docs/serving.md.")
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] | None = Field(
        None, description="The smaller, the sooner, among the requests of one API key."
    )
    deadline: Seconds | None = Field(None, description="Seconds after which the answer is given up.")
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Only requests with the same salt share cached prefixes of their prompts."
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="vLLM's name for a JSON schema.")
    guided_regex: Annotated[str, Field(max_length=MAX_ITEMS)] | None = None
    guided_choice: Alternatives | None = None
    guided_grammar: Annotated[str, Field(max_length=1 << 18)] | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's newer name for the same.")


class ContentPart(Open):
    """A piece of a message."""

    type: str
    text: str | None = None


class FunctionCall(Open):
    """A call as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Open):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Open):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None


class JsonSchema(Open):
    """A named schema."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Open):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Open):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Open):
    """A tool; there are only functions."""

    type: Literal["function"]
    function: Function


class NamedFunction(Open):
    """Which function."""

    name: str


class NamedTool(Open):
    """Exactly this tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Prediction(Open):
    """What the answer will probably resemble."""

    type: Literal["content"]
    content: str | Items[ContentPart]


class ChatRequest(Sampling):
    """A conversation to go on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None


class CompletionRequest(Sampling):
    """A text to go on with."""

    prompt: str | Items[str] | TokenIds | Items[TokenIds] | None = Field(
        None, description="Has to be given unless `encoder_input` is: then it is how the answer begins."
    )
    encoder_input: str | Items[str] | TokenIds | Items[TokenIds] | None = Field(
        None, description="What the encoder of an encoder-decoder model reads; one, or one for each prompt."
    )
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, description="0, only with `echo`: nothing is generated; with `logprobs` the prompt is scored."
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = Field(None, description="Repeat the prompt; with `logprobs`, those of its tokens as well.")
    best_of: int | None = None
    prediction: Prediction | None = None


class TokenizeRequest(Open):
    """A text, or a conversation as the model would read it."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Open):
    """Tokens to be read."""

    tokens: TokenIds
