"""The learner's patience, and what it makes of refusals."""

from __future__ import annotations

import httpx
import pytest

from app.learner.client import ControlClient, Fenced
from app.protocol.errors import BadInput, LearnerError, Malformed, Unauthorized, Unavailable
from app.protocol.learner import Done, LearnerHeartbeat, StartRequest, StepReport

WORD = {"command": "run", "staleness_budget": 3, "publish_period": 2, "news": "unknown fields are fine"}
REPORT = StepReport(step=1, t_train=1, t_idle=0, reward=0, trained=["a"], lags={0: 1})
BEAT = LearnerHeartbeat(step=0, state="waiting")


class World:
    """A clock that only waiting moves, and a service that answers from a list."""

    def __init__(self, *answers) -> None:
        self.now = 0.0
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def client(self, **options) -> ControlClient:
        return ControlClient(
            "http://control",
            "j1",
            "secret-token",
            transport=httpx.MockTransport(self.answer),
            clock=lambda: self.now,
            pause=self.pause,
            **options,
        )


def problem(status: int, **fields) -> httpx.Response:
    return httpx.Response(status, json=fields, headers={"content-type": "application/problem+json"})


def test_calls_carry_token_and_epoch_after_start():
    spec = {"model": "tiny", "task": {"name": "x"}, "budget_usd": "1"}
    start = {"job_id": "j1", "epoch": 7, "spec": spec, "relay_token": "r", "last_step": 0, "published_version": None}
    world = World(httpx.Response(200, json=start), httpx.Response(200, json=WORD))
    client = world.client()
    client.start(StartRequest(pid=1, host="h"))
    assert client.step(REPORT).command == "run"
    first, second = world.requests
    assert str(second.url) == "http://control/v1/jobs/j1/learner/steps"
    assert "Echo2-Epoch" not in first.headers
    assert second.headers["Echo2-Epoch"] == "7"
    assert second.headers["Authorization"] == "Bearer secret-token"
    assert StepReport.model_validate_json(second.content) == REPORT


@pytest.mark.parametrize("trouble", [httpx.ConnectError("down"), httpx.ReadTimeout("slow"), 502, 503, 500])
def test_a_service_that_restarts_is_waited_for(trouble):
    def fault():
        return trouble if isinstance(trouble, Exception) else httpx.Response(trouble)

    world = World(*[fault() for _ in range(20)], httpx.Response(200, json=WORD))
    assert world.client().step(REPORT).staleness_budget == 3
    assert 60 < world.now < 600


def test_patience_ends():
    world = World(httpx.ConnectError("down"))
    with pytest.raises(Unavailable, match="600 s"):
        world.client().step(REPORT)
    assert 590 < world.now <= 600


def test_a_heartbeat_is_tried_once():
    world = World(httpx.ConnectError("down"))
    with pytest.raises(Unavailable):
        world.client().heartbeat(BEAT)
    assert len(world.requests) == 1


def test_a_replaced_learner_is_fenced_at_once():
    world = World(problem(409, type="https://echo2/problems/conflict", detail="epoch 3 is not the newest"))
    with pytest.raises(Fenced, match="epoch 3") as caught:
        world.client().step(REPORT)
    assert isinstance(caught.value, LearnerError)
    assert len(world.requests) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            problem(422, type="urn:echo2:invalid_request", detail="no", errors=[{"pointer": "/x", "detail": "y"}]),
            BadInput,
        ),
        (problem(422, code="invalid_request", title="Invalid"), BadInput),
        (problem(401, detail="who?"), Unauthorized),
        (httpx.Response(418, text="not json"), LearnerError),
        (problem(400, code="malformed_request", detail="?"), Malformed),
    ],
)
def test_refusals_become_the_error_tree(answer, error):
    world = World(answer)
    with pytest.raises(error) as caught:
        world.client().done(Done(status="finished", step=1))
    assert "/done" in caught.value.detail
    assert len(world.requests) == 1
    if answer.status_code == 422 and b"pointer" in answer.content:
        assert caught.value.errors[0].pointer == "/x"


def test_an_answer_of_another_shape_is_malformed():
    with pytest.raises(Malformed, match="LearnerDirectives"):
        World(httpx.Response(200, json={"hello": 1})).client().step(REPORT)


def test_the_token_is_not_in_errors(caplog):
    world = World(httpx.ConnectError("down"))
    client = world.client(patience_s=3)
    with pytest.raises(Unavailable) as caught, caplog.at_level("DEBUG"):
        client.step(REPORT)
    assert "secret-token" not in str(caught.value) + caplog.text + repr(client)


def test_closing_ends_the_wait():
    world = World(httpx.ConnectError("down"))
    client = world.client()
    world.pause = lambda seconds: client.close()
    client._pause = world.pause
    with pytest.raises(Unavailable, match="closed"):
        client.step(REPORT)
    assert len(world.requests) == 1
