"""Whatever the OpenAPI description allows, and what it forbids: no route answers with a 5xx, and
every answer is one the description knows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup, ServerError
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from rota.sched.web.openapi import OPERATIONS

ADMIN = "admin-key-for-tests"
CHECKS = [not_a_server_error, content_type_conformance, status_code_conformance]
ROUTES = [(method, path) for method, path, *_ in OPERATIONS]


@pytest.fixture
def url(serving: Any) -> Iterator[str]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(socket=True)) as face,
    ):
        yield face.base_url


def ask(url: str, operation: Any, mode: GenerationMode) -> None:
    @settings(
        max_examples=15,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = case.call(headers={"Authorization": f"Bearer {ADMIN}"}, timeout=20)
        case.validate_response(answer, checks=CHECKS)

    check()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), ROUTES, ids=lambda p: re.sub(r"\W+", "-", p))
def test_no_answer_is_a_5xx(url: str, method: str, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        return  # nothing to get wrong
    ask(url, operation, mode)


def test_a_bug_would_be_seen(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.sched.web.ui.json_response", lambda *_, **__: 1 / 0)
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    with pytest.raises(FailureGroup) as caught:
        ask(url, schema["/ui/state"]["get"], GenerationMode.POSITIVE)
    assert any(isinstance(e, ServerError) for e in caught.value.exceptions)
