"""Where notifications may go: no name, literal or redirect leads into the network that the service stands in."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import httpx
import pytest

from app.fleet.outward import Forbidden, Outward, public, url_problem

INSIDE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.9", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:169.254.169.254", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:a00:1::", "2001:db8::1",
]  # fmt: skip
OUTSIDE = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("text", INSIDE)
def test_addresses_of_the_inside_are_not_public(text: str) -> None:
    assert not public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", OUTSIDE)
def test_addresses_of_the_outside_are_public(text: str) -> None:
    assert public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.org/x", "file:///etc/passwd", "gopher://example.org", "example.org", "http://", "https:///x",
        "http://user:secret@example.org/", "http://127.0.0.1:80/", "http://[::1]/", "http://localhost:9/x",
        "http://a.localhost/", "http://169.254.169.254/latest", "http://example.org:99999/", "http://exa mple.org/",
        "http://example.org:0/", "https://hooks..example.org/", f"https://{'a' * 64}.example.org/",
    ],
)  # fmt: skip
def test_what_the_text_of_a_url_gives_away_is_refused(url: str) -> None:
    problem = url_problem(url, allow_private=False)
    assert problem
    assert "secret" not in problem


def test_a_setting_lets_private_addresses_in_and_nothing_else() -> None:
    assert url_problem("http://127.0.0.1:8000/x?y=1", allow_private=True) == ""
    assert url_problem("https://hooks.example.org/x", allow_private=False) == ""
    assert url_problem("ftp://127.0.0.1/", allow_private=True)


class Line:
    """What would go out, and a resolver that says another thing each time."""

    def __init__(self, *answers: Sequence[str], status: int = 200) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.sent: list[httpx.Request] = []
        self.status = status

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(f"{host}:{port}")
        return self.answers.pop(0)

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request)
        return httpx.Response(self.status, headers={"location": "http://169.254.169.254/"})

    def outward(self, *, allow_private: bool = False) -> Outward:
        return Outward(allow_private=allow_private, resolver=self.resolve, transport=httpx.MockTransport(self.handle))


async def test_the_address_that_was_checked_is_the_one_that_is_asked() -> None:
    line = Line(["8.8.8.8"], ["10.0.0.1"])
    assert await line.outward().post("https://hooks.example.org:8443/in?key=1", b"{}", {"x-a": "b"}) == 200
    (request,) = line.sent
    assert str(request.url) == "https://8.8.8.8:8443/in?key=1"
    assert request.headers["host"] == "hooks.example.org:8443"
    assert request.extensions["sni_hostname"] == "hooks.example.org"
    assert (request.headers["x-a"], request.content, line.asked) == ("b", b"{}", ["hooks.example.org:8443"])


async def test_an_address_of_version_6_is_asked_too() -> None:
    line = Line(["2606:4700::1111"])
    await line.outward().post("http://hooks.example.org/in", b"{}", {})
    assert str(line.sent[0].url) == "http://[2606:4700::1111]/in"
    assert line.asked == ["hooks.example.org:80"]


@pytest.mark.parametrize("answer", [["10.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["fe80::1%eth0"]])
async def test_a_name_that_leads_inside_is_not_asked(answer: list[str]) -> None:
    line = Line(answer)
    with pytest.raises(Forbidden, match="private"):
        await line.outward().post("https://hooks.example.org/", b"{}", {})
    assert line.sent == []
    allowed = Line(answer)
    assert await allowed.outward(allow_private=True).post("http://hooks.example.org/", b"{}", {}) == 200


async def test_a_redirect_is_an_answer_like_any_other() -> None:
    line = Line(["8.8.8.8"], status=307)
    assert await line.outward().post("https://hooks.example.org/", b"{}", {}) == 307
    assert len(line.sent) == 1
