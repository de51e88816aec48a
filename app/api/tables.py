"""Answers for people with curl: an aligned table in place of JSON.

Invariant: a cell holds no control character, whoever wrote its text; a table can't drive the reader's terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import Request
from fastapi.responses import PlainTextResponse
from tabulate import tabulate

from app.protocol.errors import BadInput, FieldError

ABSENT = "-"


def wants_text(request: Request, others: str = "text or json") -> bool:
    """Whether to answer with a table: `?format=text`, or an Accept that prefers text/plain over application/json.

    `?format` wins over Accept. Raises BadInput for a format other than `text` and `json`; `others` are those that it
    names as possible.
    """
    wanted = request.query_params.get("format")
    if wanted is not None:
        if wanted not in ("text", "json"):
            raise BadInput(f"format must be {others}", errors=[FieldError("/format", f"must be {others}")])
        return wanted == "text"
    accept = ",".join(request.headers.getlist("accept"))
    return _rank(accept, "text/plain") > _rank(accept, "application/json")


def wants_csv(request: Request) -> bool:
    """Whether to answer with a CSV file: `?format=csv`, or an Accept that prefers text/csv over JSON and text/plain.

    To be asked before `wants_text`, which does not know the format.
    """
    wanted = request.query_params.get("format")
    if wanted is not None:
        return wanted == "csv"
    accept = ",".join(request.headers.getlist("accept"))
    return _rank(accept, "text/csv") > max(_rank(accept, "application/json"), _rank(accept, "text/plain"))


def _rank(accept: str, media_type: str) -> tuple[float, int, int]:
    """Quality, how exactly the type is named, and minus its place in the header: larger is preferred (RFC 9110)."""
    kind = media_type.partition("/")[0]
    exactness = {media_type: 2, f"{kind}/*": 1, "*/*": 0}
    best, found = -1, (0.0, -1, 0)
    for place, part in enumerate(accept.split(",")):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        exact = exactness.get(name, -1)
        # The most exact range decides the quality, even where a vaguer one is higher.
        if exact > best:
            best, found = exact, (_quality(parameters), exact, -place)
    return found if found[0] > 0 else (0.0, -1, 0)


def _quality(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(max(float(value), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """Rows under a line of column names; numbers are aligned to the right. A missing or None cell is `-`."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    align = ["right" if _is_numeric([line[i] for line in cells]) else "left" for i in range(len(columns))]
    return tabulate(
        cells,
        headers=[column.upper() for column in columns],
        tablefmt="plain",
        disable_numparse=True,
        colalign=align if cells else None,
    )


def text_response(text: str, more: str | None = None) -> PlainTextResponse:
    """A text as answer, ending in one newline. `more`: the cursor of the next page, told in a line of its own."""
    told = "" if more is None else f"\n\nmore: cursor={more}"
    return PlainTextResponse(text.rstrip("\n") + told + "\n", headers={"Vary": "Accept"})


def _cell(value: object) -> str:
    if value is None or value == "":
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(_cell(item) for item in value) or ABSENT
    return "".join(c if c.isprintable() else "?" for c in str(value))


def _is_numeric(column: Sequence[str]) -> bool:
    given = [cell for cell in column if cell != ABSENT]
    return bool(given) and all(_is_number(cell) for cell in given)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
