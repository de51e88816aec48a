"""Who gets which rows, packed rows, and ranks that lose sight of each other."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from app.learner.config import LearnerSettings, load_settings
from app.learner.microbatch import Row, collate, completion_logprobs, share, split
from app.learner.objects import open_objects
from app.learner.packing import check_packing
from app.learner.parallel import ranks
from app.learner.parallel.launch import launch
from app.learner.parallel.messages import packed, unpacked
from app.learner.parallel.ranks import ALONE, Group
from app.learner.sink import relay_url
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import BadInput, LearnerError, Refused, Unavailable
from app.protocol.learner import StartAnswer
from app.protocol.trajectory import read_table
from tests.unit.learner.samples import VOCABULARY, batch, job, random_model

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 100), st.booleans())
def test_every_row_is_in_one_micro_batch_of_one_rank(lengths: list[int], ranks: int, limit: int, packing: bool):
    plans = share(lengths, ranks, limit, packed=packing)
    assert len(plans) == ranks
    assert sorted(i for plan in plans for part in plan for i in part) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1, "a pass is something that all ranks do"
    for part in (part for plan in plans for part in plan if len(part) > 1):
        sizes = [lengths[i] for i in part]
        assert (sum(sizes) if packing else len(sizes) * max(sizes)) <= limit


@given(LENGTHS, st.integers(2, 5))
def test_ranks_get_about_the_same(lengths: list[int], ranks: int):
    tokens = [sum(lengths[i] for part in plan for i in part) for plan in share(lengths, ranks, 50)]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


def test_long_answers_are_dealt_first_so_that_short_ones_even_ranks_out():
    lengths = [1, 1, 1, 1, 4]
    assert share(lengths, 2, 50) == [[[4]], [[0, 1, 2, 3]]]
    assert share([2, 5, 3, 3], 3, 50) == [[[1]], [[2, 0]], [[3]]]


@given(LENGTHS, st.integers(1, 100))
def test_one_rank_cuts_as_ever(lengths: list[int], limit: int):
    assert share(lengths, 1, limit) == [split(lengths, limit)]


def test_packing_fills_rows_that_padding_would_waste():
    lengths = [40, *[3] * 50]
    assert len(split(lengths, 60, packed=True)) == 4, "190 tokens in rows of 60"
    assert split([50, 8, 8, 2], 60, packed=True) == [[0, 1, 3], [2]]


def test_packed_answers_have_the_logprobs_that_they_have_alone():
    rows = [
        Row(
            [3 + i, 7, 1][: 1 + i % 3],
            [(5 * i + j) % VOCABULARY for j in range(1 + i)],
            [-1.0] * (1 + i),
            0.5,
            [0] * (1 + i),
        )
        for i in range(6)
    ]
    model = random_model()
    with torch.no_grad():
        padded, together = (
            completion_logprobs(model, collate(rows, torch.device("cpu"), packed=p), 0.7) for p in (False, True)
        )
    torch.testing.assert_close(together, padded, atol=1e-5, rtol=1e-5)
    one, other = (collate(rows, torch.device("cpu"), packed=p) for p in (False, True))
    assert torch.equal(one.sequence, other.sequence)
    assert torch.equal(one.token, other.token)


def test_a_model_that_looks_across_the_border_is_refused():
    class Leaky(torch.nn.Module):
        """Adds the sum of all tokens before, whatever the positions say."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.config, self.device = random_model(), random_model().config, torch.device("cpu")

        def forward(self, input_ids, **given):
            answer = self.inner(input_ids=input_ids, **given)
            keep = given["logits_to_keep"]
            seen = input_ids.cumsum(1)
            seen = seen[:, -keep:] if isinstance(keep, int) else seen[:, keep]
            answer.logits = answer.logits + 0.01 * seen[..., None] * torch.arange(VOCABULARY)
            return answer

    check_packing(random_model(), close=1e-3)
    with pytest.raises(BadInput, match="change each other"):
        check_packing(Leaky(), close=1e-3)


def test_groups_pass_between_ranks_whole_and_in_order():
    groups = batch(3)
    once = unpacked(packed(groups))
    assert [g.work_item for g in once] == [g.work_item for g in groups]
    assert [r.completion_ids for g in once for r in g.rollouts] == [
        r.completion_ids for g in groups for r in g.rollouts
    ]
    assert unpacked(packed(once)) == once


@pytest.mark.parametrize(("limit", "reason"), [("max_values", "too_large"), ("max_rows", "too_many_rows")])
def test_a_step_may_be_larger_than_a_file_of_a_node(monkeypatch: pytest.MonkeyPatch, limit: str, reason: str):
    """128 prompts × 16 answers of 16,384 tokens are."""
    monkeypatch.setitem(read_table.__kwdefaults__, limit, 5)
    data = packed(batch(3))
    with pytest.raises(Refused) as refused:
        read_table(data)
    assert refused.value.reason == reason
    assert [g.work_item for g in unpacked(data)] == [g.work_item for g in batch(3)]


class Clock:
    """A minute passes whenever somebody looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 60
        return self.now


def test_a_rank_that_hears_nothing_of_rank_0_ends():
    store = dist.HashStore()
    store.set("alive", "5")
    follower = Group(store, rank=1, size=2, look_s=0.01, clock=Clock())
    with pytest.raises(Unavailable, match="rank 0 has been silent for 120 s"):
        follower.listen()


def test_announcements_come_in_order():
    store = dist.HashStore()
    lead = Group(store, rank=0, size=2)
    follower = Group(store, rank=1, size=2, look_s=0.01)
    for op in ("state", "evaluate", "end"):
        lead.announce(op)
        assert follower.listen().op == op
    follower.announce("end")
    assert not store.check(["command/3"]), "only rank 0 announces"
    lead.close()


def test_a_rank_that_is_late_hears_all_that_was_announced_and_nothing_is_left_of_what_is_long_over():
    store = dist.HashStore()
    lead = Group(store, rank=0, size=2)
    follower = Group(store, rank=1, size=2, look_s=0.01, silence_s=0.0, clock=Clock())
    lead.announce("restore")
    lead.announce("weights")
    assert [follower.listen().op for _ in range(2)] == ["restore", "weights"]
    for _ in range(3):
        lead.announce("weights")
    assert [n for n in range(5) if store.check([f"command/{n}"])] == [3, 4]
    lead.close()


def test_a_rank_waits_for_as_long_as_rank_0_gives_signs_of_life():
    class Living(dist.HashStore):  # type: ignore[misc]
        """Another sign at each look, and after ten minutes an announcement."""

        looks = 0

        def get(self, key: str) -> bytes:
            self.looks += key == "alive"
            if self.looks == 10:
                self.set("command/0", json.dumps({"op": "end", "bytes": 0}))
            return str(self.looks).encode() if key == "alive" else super().get(key)

    follower = Group(Living(), rank=1, size=2, look_s=0.01, clock=Clock())
    assert follower.listen().op == "end"


def test_rank_0_gives_signs_of_life_until_it_closes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "BEAT_S", 0.001)
    store = dist.HashStore()
    lead = Group(store, rank=0, size=2)
    until = time.monotonic() + 30
    while store.get("alive") == b"0":
        assert time.monotonic() < until
    lead.close()
    assert not any(thread.name == "ranks" and thread.is_alive() for thread in threading.enumerate())


@pytest.mark.parametrize(("rank", "call"), [(1, "get"), (1, "wait"), (0, "set")])
def test_a_store_that_is_gone_is_the_end(rank: int, call: str):
    """It is rank 0's: with rank 0 it goes."""

    class Gone(dist.HashStore):  # type: ignore[misc]
        def fail(self, *args: object) -> None:
            raise dist.DistNetworkError("connection reset")

    store = Gone()
    group = Group(store, rank=rank, size=2, look_s=0.01)
    setattr(store, call, store.fail)
    with pytest.raises(Unavailable, match="connection reset"):
        group.announce("end") if rank == 0 else group.listen()
    if rank == 0:
        group.close()


@pytest.mark.parametrize(
    ("host", "port", "announce", "url"),
    [
        ("127.0.0.1", 7000, "", "http://127.0.0.1:7000"),
        ("::", 7000, "", "http://[::]:7000"),
        ("0.0.0.0", 7000, "box.example.org", "http://box.example.org:7000"),
        ("0.0.0.0", 7000, "box.example.org:99", "http://box.example.org:99"),
        ("::", 7000, "[2001:db8::1]", "http://[2001:db8::1]:7000"),
        ("::", 7000, "[2001:db8::1]:99", "http://[2001:db8::1]:99"),
    ],
)
def test_a_relay_is_announced_where_nodes_reach_it(host: str, port: int, announce: str, url: str):
    assert relay_url(host, port, announce) == url


def settings(monkeypatch: pytest.MonkeyPatch, **given: str) -> LearnerSettings:
    for name in ("ECHO2_OBJECT_STORE_URL", "ECHO2_STATE_DIR", "ECHO2_LEARNER_RELAY_ANNOUNCE"):
        monkeypatch.delenv(name, raising=False)
    return load_settings("j", control_url="http://c", learner_token="t", **given)


@pytest.mark.parametrize("announce", ["http://box", "box:", "box:1:2", "a b", "2001:db8::1"])
def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, announce: str):
    with pytest.raises(BadInput, match="ECHO2_LEARNER_RELAY_ANNOUNCE"):
        settings(monkeypatch, learner_relay_announce=announce)


def answer(url: str) -> StartAnswer:
    return StartAnswer(
        job_id="j", epoch=1, spec=job(), relay_token="r", last_step=0, published_version=None, object_store_url=url
    )


def test_objects_are_where_the_control_service_says_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    given = settings(monkeypatch, state_dir=str(tmp_path))
    open_objects(given, answer(theirs.as_uri())).put("k", b"x")
    assert (theirs / "k").read_bytes() == b"x"
    told = settings(monkeypatch, state_dir=str(tmp_path), object_store_url=ours.as_uri())
    open_objects(told, answer(theirs.as_uri())).put("k", b"y")
    assert (ours / "k").read_bytes() == b"y"
    with pytest.raises(BadInput, match="not on this machine"):
        open_objects(given, answer((tmp_path / "elsewhere").as_uri()))


def test_a_process_alone_needs_no_torchrun_and_half_an_environment_is_refused():
    assert launch(1.0, {}) is ALONE
    assert launch(1.0, {"WORLD_SIZE": "1"}) is ALONE
    with pytest.raises(BadInput, match="LOCAL_RANK"):
        launch(1.0, {"WORLD_SIZE": "2", "RANK": "0"})


def test_what_is_said_is_json():
    store = dist.HashStore()
    lead = Group(store, rank=0, size=2)
    lead.announce("state")
    assert json.loads(store.get("command/0")) == {"op": "state", "bytes": 0}
    lead.close()


def test_a_rehearsal_of_a_broken_model_says_so_and_leaves_no_trace():
    model = random_model()
    model.model.norm.weight.data[0] = torch.inf
    trainer = GRPOTrainer(model, job())
    before = model.model.embed_tokens.weight.detach().clone()
    with pytest.raises(LearnerError, match="not finite"):
        trainer.rehearse(8, [[1, 2, 3]], 4)
    assert torch.equal(model.model.embed_tokens.weight, before)
    assert all(p.grad is None for p in model.parameters())
