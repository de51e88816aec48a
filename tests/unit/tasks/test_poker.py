"""The game's rules by table, the deals of both splits, and that words are all that a hand depends on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol.errors import BadInput
from app.protocol.task_spec import TaskSpec
from app.tasks.base import Prompt, is_multi_turn
from app.tasks.poker import Deal, PokerTask, all_deals, chance, opponent_action
from app.tasks.poker_rules import MOST_CHIPS, Action, State, payoff, play, read_action
from app.tasks.registry import load_task

LETTER = {"k": Action.CHECK, "c": Action.CALL, "b": Action.BET, "r": Action.RAISE, "f": Action.FOLD}


def played(actions: str, cards: tuple[str, str] = ("K", "J"), common: str = "Q") -> State:
    state = State(cards, common)
    for letter in actions:
        state = play(state, LETTER[letter])
    return state


@pytest.mark.parametrize(
    ("actions", "cards", "common", "won"),
    [
        # All check: the higher card takes the other's ante.
        ("kkkk", ("K", "J"), "Q", (1, -1)),
        ("kkkk", ("J", "Q"), "K", (-1, 1)),
        ("kkkk", ("Q", "Q"), "K", (0, 0)),
        # A pair with the common card beats a king.
        ("kkkk", ("J", "K"), "J", (1, -1)),
        ("kkkk", ("K", "Q"), "Q", (-1, 1)),
        # A fold loses what is in, whatever the cards.
        ("bf", ("J", "K"), "K", (1, -1)),
        ("kbf", ("K", "J"), "K", (-1, 1)),
        ("brf", ("K", "J"), "K", (-3, 3)),
        ("bckbf", ("K", "J"), "K", (-3, 3)),
        # Bets of 2, then of 4; two a round.
        ("bckk", ("K", "J"), "Q", (3, -3)),
        ("brckk", ("K", "J"), "Q", (5, -5)),
        ("kkbc", ("K", "J"), "Q", (5, -5)),
        ("kbckbrc", ("J", "K"), "J", (11, -11)),
        ("brcbrc", ("K", "J"), "Q", (13, -13)),
    ],
)
def test_what_a_hand_pays(actions: str, cards: tuple[str, str], common: str, won: tuple[int, int]):
    assert payoff(played(actions, cards, common)) == won


@pytest.mark.parametrize(
    ("actions", "player", "legal"),
    [
        ("", 0, "kb"),
        ("k", 1, "kb"),
        ("b", 1, "crf"),
        ("kb", 0, "crf"),
        ("br", 0, "cf"),
        ("kbr", 1, "cf"),
        ("kk", 0, "kb"),
        ("brc", 0, "kb"),
        ("kkb", 1, "crf"),
    ],
)
def test_whose_turn_it_is_and_what_is_allowed(actions: str, player: int, legal: str):
    state = played(actions)
    assert state.to_act == player
    assert state.legal == tuple(LETTER[letter] for letter in legal)


def test_what_is_not_allowed_is_an_error():
    for actions, action in (("", Action.CALL), ("br", Action.RAISE), ("bf", Action.CHECK)):
        with pytest.raises(ValueError, match="not legal"):
            play(played(actions), action)
    with pytest.raises(ValueError, match="not over"):
        payoff(played("kk"))


@given(st.data())
def test_what_one_wins_the_other_loses_and_never_more_than_there_is(data: st.DataObject):
    state = State(data.draw(st.sampled_from(list(itertools.product("JQK", "JQK")))), data.draw(st.sampled_from("JQK")))
    while state.to_act is not None:
        state = play(state, data.draw(st.sampled_from(state.legal)))
    assert (state.owed, state.legal) == (0, ()), "nobody is to act"
    first, second = payoff(state)
    assert first == -second
    assert abs(first) <= min(max(state.chips), MOST_CHIPS)


@pytest.mark.parametrize(
    ("text", "read"),
    [("check", Action.CHECK), (" BET\n", Action.BET), ("c", Action.CHECK), ("b", Action.BET)]
    + [(text, None) for text in ("", "call", "f", "bets", "check bet", "checkb", "x")],
)
def test_an_action_is_a_word_or_its_letter(text: str, read: Action | None):
    assert read_action(text, (Action.CHECK, Action.BET)) is read


def poker(seed: int = 0, **params: Any) -> Any:
    return load_task(TaskSpec(name="poker", params=params), seed)


def test_deals_are_split_by_themselves_whatever_the_seed():
    one, two = poker(0), poker(1)
    deals = [
        {split: [getattr(task, split)(i).entry["deal"] for i in range(size)] for split, size in sizes(task).items()}
        for task in (one, two)
    ]
    assert set(deals[0]["train"]) == set(deals[1]["train"])
    assert deals[0]["train"] != deals[1]["train"]
    assert not set(deals[0]["train"]) & set(deals[1]["heldout"])
    assert len(set(deals[0]["train"])) + len(set(deals[0]["heldout"])) == len(list(all_deals()))


def sizes(task: Any) -> dict[str, int]:
    return {"train": task.train_size, "heldout": task.heldout_size}


def test_three_ranks_are_dealt_twice_as_often_as_a_pair():
    counts = {True: 0, False: 0}
    for deal in all_deals():
        counts[len({deal.own, deal.other, deal.common}) == 3] += 1
    # 6 orders of three ranks at 8 of 120 deals, 18 with a pair at 4 of 120.
    assert counts[True] * 18 * 4 == counts[False] * 6 * 8


def test_the_prompt_shows_what_the_seat_may_know_and_nothing_more():
    told: dict[tuple[str, int, str], set[str]] = {}
    task = poker(rules=False)
    for index in range(task.train_size):
        prompt = task.train(index)
        deal: Deal = prompt.entry["deal"]
        opened = "bets" if "bets" in prompt.text else "checks" if "checks" in prompt.text else ""
        told.setdefault((deal.own, deal.seat, opened), set()).add(prompt.text)
    assert all(len(texts) == 1 for texts in told.values())
    assert len(told) == 9
    assert told["K", 0, ""] == {"You hold K. Check or bet?"}
    assert told["J", 1, "bets"] == {"You hold J. Opponent bets. Call, raise or fold?"}
    assert "Leduc hold'em" in poker().train(0).text


def a_deal(**wanted: Any) -> Deal:
    """A deal whose opponent neither bluffs nor folds: what decides is in the upper quarter."""
    return next(
        deal
        for deal in all_deals()
        if all(getattr(deal, key) == value for key, value in wanted.items())
        and all(chance(deal.script, n) >= 0.75 for n in range(3))
    )


def hand(deal: Deal, *turns: str) -> tuple[list[str | None], float]:
    """What was said after each turn, and the reward."""
    task, prompt = PokerTask(0), prompt_of(deal)
    replies = [task.respond(prompt, turns[: n + 1]) for n in range(len(turns))]
    return [None if reply is None else reply.text for reply in replies], task.episode_reward(prompt, turns)


def prompt_of(deal: Deal) -> Prompt:
    return Prompt(0, "", {"deal": deal})


def test_a_hand_is_told_step_by_step():
    deal = a_deal(own="K", other="Q", common="J", seat=0)
    assert hand(deal, "check", "C") == (["Opponent checks. The common card is J. Check or bet?", None], 1 / MOST_CHIPS)
    assert hand(deal, "bet", "bet") == (["Opponent calls. The common card is J. Check or bet?", None], 7 / MOST_CHIPS)


def test_an_opponent_in_front_opens_the_next_round_after_the_card():
    deal = a_deal(own="Q", other="K", common="K", seat=1)
    assert hand(deal, "call", "fold") == (["The common card is K. Opponent bets. Call, raise or fold?", None], -3 / 13)
    second = "Opponent calls. The common card is K. Opponent bets. Call, raise or fold?"
    assert hand(deal, "raise", "call") == ([second, None], -9 / 13)


@pytest.mark.parametrize(("turns", "lost"), [(["x"], 1), (["call"], 1), (["bet", ""], 3), (["bet"], 3)])
def test_what_is_illegal_unreadable_or_unfinished_forfeits(turns: list[str], lost: int):
    said, reward = hand(a_deal(own="K", other="Q", common="J", seat=0), *turns)
    assert reward == -lost / MOST_CHIPS
    assert (said[-1] is None) == (turns != ["bet"])


def test_the_opponent_plays_by_its_card():
    first = State(("Q", "Q"), "K")
    assert [opponent_action(first, card, 0.5) for card in "JQK"] == [Action.CHECK, Action.CHECK, Action.BET]
    assert opponent_action(first, "J", 0.1) is Action.BET
    facing = played("b")
    assert [opponent_action(facing, card, 0.5) for card in "JQK"] == [Action.FOLD, Action.CALL, Action.RAISE]
    paired = played("kkb", ("K", "Q"), "Q")
    assert opponent_action(paired, "Q", 0.0) is Action.RAISE
    assert opponent_action(played("kkbr", ("K", "Q"), "Q"), "Q", 0.0) is Action.CALL


def test_it_is_a_task_of_several_turns_and_checks_its_parameters():
    assert is_multi_turn(poker())
    with pytest.raises(BadInput, match="'rule' is not a parameter"):
        poker(rule=True)
    with pytest.raises(BadInput, match="must be true or false"):
        poker(rules=1)
    with pytest.raises(BadInput, match="there is no number"):
        poker().train(10**6)
