"""The command line's client: what a user can get wrong about address and key, and answers that are no Echo2's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import httpx
import pytest
from typer.testing import CliRunner

from app import client as module
from app.cli import app
from app.client import Problem, address, api_key, call, client, unwrap
from app.protocol.errors import Malformed, Unauthorized, Unavailable

DEFAULT = "http://127.0.0.1:8080"
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("ECHO2_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ECHO2_API_KEY", "ek_1")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[httpx.Request]]:
    """Puts something else in place of the network; the requests that it gets."""

    def put(answer: Answer) -> list[httpx.Request]:
        seen: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            seen.append(request)
            return answer(request)

        def make() -> httpx.Client:
            return httpx.Client(base_url=DEFAULT, transport=httpx.MockTransport(handle), timeout=module.TIMEOUT)

        monkeypatch.setattr(module, "client", make)
        return seen

    return put


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({}, DEFAULT),
        ({"ECHO2_URL": "https://echo2.example.org/base/"}, "https://echo2.example.org/base"),
        ({"ECHO2_PUBLIC_URL": "http://box:81"}, "http://box:81"),
        ({"ECHO2_URL": "http://a", "ECHO2_PUBLIC_URL": "http://b"}, "http://a"),
        ({"ECHO2_URL": "http://[::1]:8080"}, "http://[::1]:8080"),
    ],
)
def test_where_the_service_is(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], where: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert address() == where


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8080", "http://[::1", "http://host:99999", "http://a..b", "ftp://host", "http://u:hunter2@host"]
)
@pytest.mark.parametrize("name", ["ECHO2_URL", "ECHO2_PUBLIC_URL"])
def test_an_address_that_can_not_be_dialled_is_named(monkeypatch: pytest.MonkeyPatch, name: str, url: str) -> None:
    monkeypatch.setenv(name, url)
    with pytest.raises(Malformed, match=f"^{name} .*expected a URL such as http") as caught:
        call("GET", "/v1/jobs")
    assert "hunter2" not in caught.value.detail


@pytest.mark.parametrize("key", ["hunter2 ", "hunter2\n", "hunter2\r\nX-Evil: 1", "hunter2é"])
@pytest.mark.parametrize("name", ["ECHO2_API_KEY", "ECHO2_ADMIN_KEY"])
def test_a_key_that_no_header_can_carry_is_not_repeated(monkeypatch: pytest.MonkeyPatch, name: str, key: str) -> None:
    monkeypatch.delenv("ECHO2_API_KEY")
    monkeypatch.setenv(name, key)
    with pytest.raises(Unauthorized, match=f"^{name} has ") as caught:
        call("GET", "/v1/jobs")
    assert "hunter2" not in caught.value.detail


def test_without_a_key_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO2_ADMIN_KEY", "ek_admin")
    assert api_key() == "ek_1"
    monkeypatch.delenv("ECHO2_API_KEY")
    assert api_key() == "ek_admin"
    monkeypatch.delenv("ECHO2_ADMIN_KEY")
    with pytest.raises(Unauthorized, match="set ECHO2_API_KEY"):
        api_key()


@pytest.mark.parametrize(
    ("url", "proxied"),
    [(DEFAULT, False), ("http://localhost:1", False), ("http://[::1]:1", False), ("http://echo2.example.org", True)],
)
def test_a_proxy_gets_no_call_to_this_computer(monkeypatch: pytest.MonkeyPatch, url: str, proxied: bool) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ECHO2_URL", url)
    with client() as http:
        assert http.headers["authorization"] == "Bearer ek_1"
        assert any(http._mounts.values()) is proxied


def test_what_is_no_echo2_is_said_to_be_none(service: Callable[[Answer], list[httpx.Request]]) -> None:
    service(lambda _: httpx.Response(200, html="<html>hello</html>"))
    for text in (False, True):
        with pytest.raises(Unavailable, match="no Echo2; set ECHO2_URL"):
            call("GET", "/v1/jobs", text=text)
    service(lambda _: httpx.Response(301, headers={"location": "https://box/v1/jobs"}))
    with pytest.raises(Problem, match="HTTP 301 leads to https://box/v1/jobs: set ECHO2_URL"):
        call("GET", "/v1/jobs")


def test_good_answers_are_read(service: Callable[[Answer], list[httpx.Request]]) -> None:
    seen = service(lambda r: httpx.Response(200, json={"items": []}))
    assert call("GET", "/v1/jobs", params={"limit": 2}) == {"items": []}
    assert (seen[0].headers["accept"], seen[0].url.query) == ("application/json", b"limit=2")
    seen = service(lambda r: httpx.Response(200, text="ID  NAME\n"))
    assert call("GET", "/v1/jobs", text=True) == "ID  NAME\n"
    assert seen[0].headers["accept"] == "text/plain"
    service(lambda r: httpx.Response(204))
    assert call("DELETE", "/v1/keys/key_1") is None


def test_a_body_of_bytes_goes_out_as_it_is(service: Callable[[Answer], list[httpx.Request]]) -> None:
    seen = service(lambda r: httpx.Response(201, json={"id": "job_1"}))
    call("POST", "/v1/jobs", b'{"budget_usd": 0.10, "seed": NaN}', patience_s=330)
    call("POST", "/v1/keys", {"name": "ci"})
    assert [r.content for r in seen] == [b'{"budget_usd": 0.10, "seed": NaN}', b'{"name":"ci"}']
    assert {r.headers["content-type"] for r in seen} == {"application/json"}
    assert [r.extensions["timeout"]["read"] for r in seen] == [330, 30]


@pytest.mark.parametrize(
    ("body", "code", "detail", "errors"),
    [
        ({"code": "conflict", "detail": "it is over"}, "conflict", "it is over", []),
        ({"code": "x", "title": "Title"}, "x", "Title", []),
        ({}, "http_418", "HTTP 418", []),
        ([1], "http_418", "HTTP 418", []),
        ({"detail": "d", "errors": "all wrong"}, "http_418", "d", []),
        ({"detail": "d", "errors": ["x", {"pointer": "/a", "detail": "b"}]}, "http_418", "d", [("/a", "b")]),
    ],
)
def test_a_problem_is_told_as_far_as_it_is_one(
    body: object, code: str, detail: str, errors: list[tuple[str, str]]
) -> None:
    with pytest.raises(Problem) as caught:
        unwrap(httpx.Response(418, content=json.dumps(body)))
    error = caught.value
    assert (error.code, error.detail, error.status) == (code, detail, 418)
    assert [(e.pointer, e.detail) for e in error.errors] == errors


@pytest.mark.parametrize(
    ("method", "kind", "says"),
    [
        ("GET", httpx.ReadTimeout, "is `echo2 serve` running?"),
        ("POST", httpx.ConnectError, "is `echo2 serve` running?"),
        ("POST", httpx.ConnectTimeout, "is `echo2 serve` running?"),
        ("POST", httpx.ReadTimeout, "may happen all the same"),
        ("POST", httpx.RemoteProtocolError, "may happen all the same"),
    ],
)
def test_a_change_without_an_answer_may_have_happened(
    service: Callable[[Answer], list[httpx.Request]], method: str, kind: type[httpx.TransportError], says: str
) -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise kind("oh", request=request)

    service(silent)
    with pytest.raises(Unavailable, match=says):
        call(method, "/v1/jobs", b"{}" if method == "POST" else None)


@pytest.mark.parametrize("given", ["", "..", "../fleet", "job_1/fleet", "job_1?format=json", "job 1", "%2e%2e"])
@pytest.mark.parametrize(
    "command", ["job show", "job watch", "job cancel", "job learner-token", "fleet", "cost", "offers", "keys revoke"]
)
def test_what_is_no_id_asks_for_nothing_else(
    service: Callable[[Answer], list[httpx.Request]], command: str, given: str
) -> None:
    seen = service(lambda r: httpx.Response(200, text="a table of something else"))
    assert CliRunner().invoke(app, [*command.split(), given]).exit_code == 2
    assert seen == []
