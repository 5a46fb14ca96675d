"""Our own OpenAPI document, taken at its word by schemathesis: valid and invalid data, no 5xx and no hang."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import content_type_conformance, not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from draftwood import LLM
from serving import Serving

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
CHANGES_THE_SERVER = ("/manage/drain",)  # nobody else would be served
# Of the cases; the others share the rest.
SHARES = {"/v1/chat/completions": 0.32, "/v1/completions": 0.24, "/v1/responses": 0.2}


@pytest.fixture(scope="module")
def document(served: Serving) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_document_keeps_its_word(
    served: Serving, llm: LLM, document: schemathesis.BaseSchema, mode: GenerationMode, thorough: bool
) -> None:
    total = 1250 if thorough else 150
    operations = [result.ok() for result in document.get_all_operations()]
    operations = [operation for operation in operations if operation.path not in CHANGES_THE_SERVER]
    rest = (1 - sum(SHARES.values())) / (len(operations) - len(SHARES))
    for operation in operations:
        cases = max(1, round(total * SHARES.get(operation.path, rest)))
        _fuzz(operation, mode, cases)
    assert llm.pulse.failures == 0
    assert served.idle(20)


def _fuzz(operation: schemathesis.APIOperation, mode: GenerationMode, cases: int) -> None:
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.setdefault("max_tokens", 4)  # a valid request may be a long one
            case.body.setdefault("deadline", 20)
        if case.operation.path == "/live":
            case.query = {"count": 1, "every": 0.1} | dict(case.query or {})  # nobody waits for its end
        case.validate_response(case.call(timeout=60), checks=CHECKS)

    # An operation that is told nothing cannot be told anything wrong.
    with suppress(Unsatisfiable) if mode == GenerationMode.NEGATIVE else nullcontext():
        fuzz()
