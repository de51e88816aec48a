"""Error answers as a client sees them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Annotated

import httpx
import pytest
from fastapi import FastAPI, Header, HTTPException, Query
from pydantic import Field, JsonValue, model_validator

from app.api import middleware, problems
from app.protocol import errors
from app.protocol.base import Spec, Strict


class Batch(Strict):
    group_size: int = Field(ge=2)


class Params(Spec):
    of: dict[str, JsonValue] = Field(default_factory=dict)


class Body(Strict):
    batch: Batch
    names: list[Annotated[str, Field(max_length=3)]] = Field(default_factory=list)
    weird: dict[str, int] = Field(default_factory=dict)
    either: int | str | list[Batch] | None = None
    params: Params = Params()
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def _ordered(self) -> Body:
        if self.low > self.high:
            raise ValueError("low must not exceed high")
        return self


ERRORS = {
    "field": errors.BadInput("budget is wrong", errors=[errors.FieldError("/budget_usd", "must be above 0")]),
    "refused": errors.Refused("truncated", "the file ends early"),
    "unauthorized": errors.Unauthorized("no key"),
    "conflict": errors.Conflict("the job is over"),
    "integrity": errors.IntegrityError("hash differs"),
    "secret": RuntimeError("password is hunter2"),
    "teapot": HTTPException(418, "short and stout"),
}


def make_app() -> FastAPI:
    app = FastAPI()
    problems.install(app)
    middleware.install(app)

    @app.post("/body")
    async def body(value: Body) -> str:
        return "ok"

    @app.get("/query")
    async def query(limit: Annotated[int, Query(le=10)], x_n: Annotated[int, Header()] = 0) -> str:
        return "ok"

    @app.get("/raise/{name}")
    async def fail(name: str) -> str:
        raise ERRORS[name]

    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=make_app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
        yield opened


def check(answer: httpx.Response, status: int, code: str) -> dict[str, object]:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"]
    content: dict[str, object] = answer.json()
    assert content["status"] == status
    assert content["code"] == code
    assert content["type"] == f"urn:echo2:problem:{code}"
    assert content["title"]
    assert content["detail"]
    return content


def field_errors(content: dict[str, object]) -> list[dict[str, str]]:
    found = content["errors"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    ("sent", "pointer", "detail"),
    [
        ({"batch": {"group_size": 1}}, "/batch/group_size", "greater than or equal to 2"),
        ({"batch": {}}, "/batch/group_size", "required"),
        ({"batch": {"group_size": 2, "grup": 1}}, "/batch/grup", "no such field"),
        ({"batch": {"group_size": 2}, "names": ["a", "long one"]}, "/names/1", "at most 3"),
        ({"batch": {"group_size": 2}, "weird": {"a/b~c": "x"}}, "/weird/a~1b~0c", "valid integer"),
        ({"batch": {"group_size": 2}, "low": 5}, "", "low must not exceed high"),
        (None, "", "required"),
    ],
)
async def test_a_wrong_field_is_pointed_at(client: httpx.AsyncClient, sent: object, pointer: str, detail: str) -> None:
    content = check(
        await client.post("/body", json=sent) if sent else await client.post("/body"), 422, "invalid_request"
    )
    (error,) = field_errors(content)
    assert error["pointer"] == pointer
    assert error["in"] == "body"
    assert detail in error["detail"]
    assert detail in str(content["detail"])


@pytest.mark.parametrize(
    ("part", "pointers"),
    [
        ('"either": {}', {"/either"}),
        ('"either": [{}]', {"/either", "/either/0/group_size"}),
        ('"either": [{"group_size": 1}]', {"/either", "/either/0/group_size"}),
        ('"params": {"of": {"a": [1, {"int": NaN}]}}', {"/params/of/a/1/int"}),
        ('"params": {"of": {"float": NaN}}', {"/params/of/float"}),
    ],
)
async def test_a_pointer_leads_to_a_place_in_the_body_whatever_it_might_have_been(
    client: httpx.AsyncClient, part: str, pointers: set[str]
) -> None:
    sent = f'{{"batch": {{"group_size": 2}}, {part}}}'
    answer = await client.post("/body", content=sent, headers={"content-type": "application/json"})
    content = check(answer, 422, "invalid_request")
    assert {e["pointer"] for e in field_errors(content)} == pointers


async def test_values_are_not_repeated(client: httpx.AsyncClient) -> None:
    answer = await client.post("/body", json={"batch": {"group_size": "hunter2"}, "names": "hunter2"})
    content = check(answer, 422, "invalid_request")
    assert "hunter2" not in answer.text
    assert "(and 1 more)" in str(content["detail"])


async def test_query_and_header_errors_say_where(client: httpx.AsyncClient) -> None:
    content = check(await client.get("/query?limit=11", headers={"x-n": "x"}), 422, "invalid_request")
    assert [(e["in"], e["pointer"]) for e in field_errors(content)] == [("query", "/limit"), ("header", "/x-n")]


@pytest.mark.parametrize("sent", [b'{"batch": ', b"\xff\xfe", b"{} {}"])
async def test_a_body_that_is_not_json_is_malformed(client: httpx.AsyncClient, sent: bytes) -> None:
    answer = await client.post("/body", content=sent, headers={"content-type": "application/json"})
    check(answer, 400, "malformed_request")


async def test_unknown_places_and_methods(client: httpx.AsyncClient) -> None:
    assert check(await client.get("/nowhere"), 404, "not_found")["detail"] == "there is nothing at /nowhere"
    answer = await client.delete("/body")
    assert "DELETE" in str(check(answer, 405, "method_not_allowed")["detail"])
    assert answer.headers["allow"] == "POST"


async def test_our_own_errors(client: httpx.AsyncClient) -> None:
    content = check(await client.get("/raise/field"), 422, "invalid_request")
    assert content["errors"] == [{"pointer": "/budget_usd", "detail": "must be above 0"}]
    assert check(await client.get("/raise/refused"), 422, "trajectory_refused")["reason"] == "truncated"
    assert "errors" not in check(await client.get("/raise/conflict"), 409, "conflict")
    check(await client.get("/raise/integrity"), 500, "integrity")
    check(await client.get("/raise/teapot"), 418, "i_m_a_teapot")


async def test_a_401_has_a_challenge(client: httpx.AsyncClient) -> None:
    answer = await client.get("/raise/unauthorized")
    check(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_a_surprise_leaks_nothing_and_can_be_found_in_the_log(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = await client.get("/raise/secret?token=hunter3", headers={"x-request-id": "my-id-1"})
    content = check(answer, 500, "internal")
    assert answer.headers["connection"] == "close", "as the server does it"
    assert answer.headers.get_list("x-request-id") == ["my-id-1"]
    assert "my-id-1" in str(content["detail"])
    for text in ("hunter2", "RuntimeError", "Traceback"):
        assert text not in answer.text
    assert "my-id-1" in caplog.text
    assert "/raise/secret" in caplog.text
    assert "hunter3" not in caplog.text


def test_json_pointers() -> None:
    assert problems.json_pointer(()) == ""
    assert problems.json_pointer(("a", 0, "b/c", "~")) == "/a/0/b~1c/~0"
