"""Tables for curl: when they are wanted, and that they are aligned and harmless."""

from __future__ import annotations

import pytest
from fastapi import Request

from app.api.tables import table, text_response, wants_text
from app.protocol.errors import BadInput

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def request(accept: str | None = None, query: str = "") -> Request:
    headers = [(b"accept", accept.encode())] if accept is not None else []
    return Request({"type": "http", "method": "GET", "path": "/", "query_string": query.encode(), "headers": headers})


@pytest.mark.parametrize(
    ("accept", "text"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        (BROWSER, False),
        ("application/json", False),
        ("application/json, text/plain, */*", False),
        ("text/plain;q=0.5, application/json", False),
        ("text/plain;q=0, */*", False),
        ("text/plain;q=x", False),
        ("text/html", False),
        ("text/plain", True),
        ("TEXT/Plain; charset=utf-8", True),
        ("text/*", True),
        ("text/plain, */*", True),
        ("*/*, text/plain", True),
        ("text/plain, application/json", True),
        ("text/plain, application/json;q=0.9", True),
        ("application/json;q=0.2, text/plain;q=0.3", True),
        ("application/json;q=0, */*", True),
    ],
)
def test_the_accept_header_decides(accept: str | None, text: bool) -> None:
    assert wants_text(request(accept)) is text


def test_the_format_parameter_wins() -> None:
    assert wants_text(request("application/json", "format=text"))
    assert not wants_text(request("text/plain", "format=json"))
    with pytest.raises(BadInput, match="text or json") as refused:
        wants_text(request(None, "format=xml"))
    assert [e.pointer for e in refused.value.errors] == ["/format"]


def test_columns_are_aligned_and_numbers_go_right() -> None:
    rows: list[dict[str, object]] = [
        {"id": "n1", "usd": "0.100000", "rate": 1.23456, "gone": None, "spot": True},
        {"id": "node-22", "usd": "12.000000", "rate": None, "spot": False, "unasked": 1},
    ]
    assert table(rows, ["id", "usd", "rate", "gone", "spot"]).splitlines() == [
        "ID             USD    RATE  GONE    SPOT",
        "n1        0.100000   1.235  -       yes",
        "node-22  12.000000       -  -       no",
    ]


def test_an_empty_table_has_its_head() -> None:
    assert table([], ["id", "name"]).split() == ["ID", "NAME"]


def test_a_cell_cannot_drive_the_terminal_nor_break_the_line() -> None:
    text = table([{"detail": "a\nb\x1b[2Jc\u202ed\te", "list": ["x", "\r"]}], ["detail", "list"])
    assert len(text.splitlines()) == 2
    assert text.splitlines()[1].split() == ["a?b?[2Jc?d?e", "x,?"]


def test_the_answer_is_plain_text_that_ends_in_one_newline() -> None:
    answer = text_response("a\n\n")
    assert answer.body == b"a\n"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["vary"] == "Accept"
