"""Leduc hold'em, the game (Southey et al., "Bayes' Bluff: Opponent Modelling in Poker", UAI 2005).

Six cards, two each of J, Q, K. Both players put in 1 chip and get a card; a round of betting with bets of 2; a common
card is turned up; a round with bets of 4. A pair with the common card wins, else the higher card; equals share. A round
ends when a bet is called or both check; at most two bets a round.

Invariant: everything is a pure function of the deal and the actions so far; what one player wins the other loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

RANKS = "JQK"
ANTE = 1
BETS = (2, 4)
MOST_BETS = 2
MOST_CHIPS = ANTE + MOST_BETS * sum(BETS)
"""What a player can lose."""


class Action(StrEnum):
    """What a player may write: its first letter, or the word."""

    CHECK = "check"
    CALL = "call"
    BET = "bet"
    RAISE = "raise"
    FOLD = "fold"


@dataclass(frozen=True, slots=True)
class State:
    """A hand as far as it has come. `to_act` is the player, 0 or 1; None: it is over. Player 0 begins each round."""

    cards: tuple[str, str]
    common: str
    round: int = 0
    bets: int = 0
    """Bets of this round."""
    checked: bool = False
    """Whether the first player has checked in this round."""
    chips: tuple[int, int] = (ANTE, ANTE)
    to_act: int | None = 0
    folded: int | None = None

    @property
    def owed(self) -> int:
        """What the player to act must put in to stay."""
        return 0 if self.to_act is None else self.chips[1 - self.to_act] - self.chips[self.to_act]

    @property
    def legal(self) -> tuple[Action, ...]:
        """What the player to act may do."""
        if self.to_act is None:
            return ()
        if self.owed:
            return (Action.CALL, Action.RAISE, Action.FOLD) if self.bets < MOST_BETS else (Action.CALL, Action.FOLD)
        return (Action.CHECK, Action.BET)


def read_action(text: str, legal: Sequence[Action]) -> Action | None:
    """The action that a player wrote, a word or its first letter in either case; None: not readable, or not legal."""
    word = text.strip().lower()
    return next((action for action in legal if word in (action.value, action.value[0])), None)


def play(state: State, action: Action) -> State:
    """The state after a legal action of the player to act. Raises ValueError for one that is not legal."""
    player = state.to_act
    if player is None or action not in state.legal:
        raise ValueError(f"{action} is not legal here")
    match action:
        case Action.FOLD:
            return replace(state, folded=player, to_act=None)
        case Action.BET | Action.RAISE:
            chips = _put_in(state, player, state.owed + BETS[state.round])
            return replace(state, chips=chips, bets=state.bets + 1, to_act=1 - player)
        case Action.CALL:
            return _next_round(replace(state, chips=_put_in(state, player, state.owed)))
        case Action.CHECK:
            return _next_round(state) if state.checked else replace(state, checked=True, to_act=1 - player)


def payoff(state: State) -> tuple[int, int]:
    """Chips won by each player, of a hand that is over. Raises ValueError for one that is not."""
    if state.to_act is not None:
        raise ValueError("the hand is not over")
    if state.folded is not None:
        winner = 1 - state.folded
    else:
        strengths = [strength(card, state.common) for card in state.cards]
        if strengths[0] == strengths[1]:
            return 0, 0
        winner = 0 if strengths[0] > strengths[1] else 1
    won = state.chips[1 - winner]
    return (won, -won) if winner == 0 else (-won, won)


def strength(card: str, common: str) -> int:
    """A number that is greater for the better hand."""
    return RANKS.index(card) + (len(RANKS) if card == common else 0)


def _put_in(state: State, player: int, amount: int) -> tuple[int, int]:
    first, second = state.chips
    return (first + amount, second) if player == 0 else (first, second + amount)


def _next_round(state: State) -> State:
    if state.round + 1 == len(BETS):
        return replace(state, to_act=None)
    return replace(state, round=state.round + 1, bets=0, checked=False, to_act=0)
