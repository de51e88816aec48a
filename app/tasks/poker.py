"""Leduc hold'em against a fixed opponent: the example of a task with several turns.

The policy plays one seat by writing actions. Its reward is what it wins, in parts of the most that can be lost. An
action that can't be read or is not legal, or a hand that is not played to its end, forfeits what it has put in.

Invariant: a hand, the opponent's chance included, follows from its deal alone; a deal belongs to one split by its own
text, whatever the seed.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import JsonValue

from app.protocol.errors import BadInput
from app.tasks.base import Prompt, Reply, Split, is_heldout
from app.tasks.names import wrong_params
from app.tasks.poker_rules import MOST_CHIPS, RANKS, Action, State, payoff, play, read_action

SCRIPTS = 128
"""Chances of the opponent, for each deal of cards that has the least weight."""
_RULES = (
    "Leduc hold'em: two each of J, Q and K. Both players put in 1 chip and hold one card. After a round of bets of 2 a "
    "common card is turned up, then comes a round of bets of 4, at most two bets a round. A pair with the common card "
    "wins, else the higher card. Answer with one word.\n"
)
_DID = {"check": "checks", "call": "calls", "bet": "bets", "raise": "raises", "fold": "folds"}


@dataclass(frozen=True, slots=True)
class Deal:
    """What chance decides of a hand. `seat`: where the policy sits; 0 acts first."""

    own: str
    other: str
    common: str
    seat: int
    script: int

    def __str__(self) -> str:
        return f"{self.own} {self.other} {self.common} {self.seat} {self.script}"

    @property
    def state(self) -> State:
        """The hand before the first action."""
        return State((self.own, self.other) if self.seat == 0 else (self.other, self.own), self.common)


class PokerTask:
    """`MultiTurnTask`. Holds all deals of both splits."""

    name = "poker"
    deterministic = True

    def __init__(self, seed: int, *, rules: bool = True) -> None:
        deals = list(all_deals())
        random.Random(seed).shuffle(deals)
        self._deals: dict[Split, list[Deal]] = {
            "train": [deal for deal in deals if not is_heldout(str(deal))],
            "heldout": [deal for deal in deals if is_heldout(str(deal))],
        }
        self._rules = _RULES if rules else ""

    @classmethod
    def from_params(cls, params: Mapping[str, JsonValue], seed: int) -> Self:
        """Build from `{"rules": whether each prompt begins with the rules}`. Raises BadInput."""
        for key in params.keys() - {"rules"}:
            raise wrong_params(f"/{key}", f"{key!r} is not a parameter of poker; known: rules")
        rules = params.get("rules", True)
        if not isinstance(rules, bool):
            raise wrong_params("/rules", f"rules {rules!r} must be true or false")
        return cls(seed, rules=rules)

    @property
    def train_size(self) -> int:
        """Number of deals to train on."""
        return len(self._deals["train"])

    @property
    def heldout_size(self) -> int:
        """Number of deals held out."""
        return len(self._deals["heldout"])

    def train(self, index: int) -> Prompt:
        """Training deal number `index`. Raises BadInput when there is none."""
        return self._prompt("train", index)

    def heldout(self, index: int) -> Prompt:
        """Held-out deal number `index`. Raises BadInput when there is none."""
        return self._prompt("heldout", index)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
        """What the opponent does, and what is asked next; None when the hand is over or forfeited."""
        deal: Deal = prompt.entry["deal"]
        hand = follow(deal, turns)
        return None if hand is None or hand.state.to_act is None else Reply(_told(hand, deal))

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        """Of a hand that this one action is all of."""
        return self.episode_reward(prompt, [completion_text])

    def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        """Chips won, over the most that can be lost: −1 … 1."""
        deal: Deal = prompt.entry["deal"]
        hand = follow(deal, turns)
        if hand is not None and hand.state.to_act is None:
            return payoff(hand.state)[deal.seat] / MOST_CHIPS
        played = hand if hand is not None else _before(deal, turns)
        return -played.state.chips[deal.seat] / MOST_CHIPS

    def _prompt(self, split: Split, index: int) -> Prompt:
        deals = self._deals[split]
        if not 0 <= index < len(deals):
            raise BadInput(f"poker has {len(deals)} {split} prompts; there is no number {index}")
        deal = deals[index]
        hand = _opponent(_Hand(deal.state), deal)
        return Prompt(index, f"{self._rules}You hold {deal.own}. {_told(hand, deal)}", {"deal": deal})


def all_deals() -> Iterator[Deal]:
    """Every deal as often as the cards make it likely: three different ranks come twice as often as two."""
    for own, other, common in itertools.product(RANKS, repeat=3):
        ranks = len({own, other, common})
        if ranks > 1:
            for seat, script in itertools.product((0, 1), range(SCRIPTS * (ranks - 1))):
                yield Deal(own, other, common, seat, script)


@dataclass(frozen=True, slots=True)
class _Hand:
    """A state, and what the opponent did since the policy's last action."""

    state: State
    done: tuple[Action, ...] = ()
    turned: bool = False
    """Whether the common card was turned up since then."""
    decisions: int = 0
    """Of the opponent, so far."""


def follow(deal: Deal, turns: Sequence[str]) -> _Hand | None:
    """The hand after the policy's turns and the opponent's answers; None if a turn forfeits it."""
    hand = _opponent(_Hand(deal.state), deal)
    for turn in turns:
        action = read_action(turn, hand.state.legal)
        if action is None:
            return None
        before = hand.state.round
        state = play(hand.state, action)
        hand = _opponent(_Hand(state, (), state.round > before, hand.decisions), deal)
    return hand


def _before(deal: Deal, turns: Sequence[str]) -> _Hand:
    """The hand before the turn that forfeits it."""
    hand = _opponent(_Hand(deal.state), deal)
    for count in range(1, len(turns) + 1):
        following = follow(deal, turns[:count])
        if following is None:
            break
        hand = following
    return hand


def _opponent(hand: _Hand, deal: Deal) -> _Hand:
    """Let the opponent act until the policy is to act or the hand is over."""
    while hand.state.to_act == 1 - deal.seat:
        action = opponent_action(hand.state, deal.other, chance(deal.script, hand.decisions))
        state = play(hand.state, action)
        hand = _Hand(state, (*hand.done, action), hand.turned or state.round > hand.state.round, hand.decisions + 1)
    return hand


def chance(script: int, decision: int) -> float:
    """The number in [0, 1) that decides what the opponent does."""
    digest = hashlib.blake2b(f"{script}/{decision}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def opponent_action(state: State, card: str, luck: float) -> Action:
    """What the opponent does with its card, `luck` uniform in [0, 1): strong hands bet, weak ones sometimes bluff."""
    pair = state.round == 1 and card == state.common
    best = pair or (state.round == 0 and card == RANKS[-1])
    if not state.owed:
        return Action.BET if best or luck < 0.25 else Action.CHECK
    if best and Action.RAISE in state.legal:
        return Action.RAISE
    folds = 0.0 if best else {"J": 0.75, "Q": 0.25, "K": 0.0}[card]
    return Action.FOLD if luck < folds else Action.CALL


def _told(hand: _Hand, deal: Deal) -> str:
    """What happened since the policy's last action, and what it may do now."""
    parts = [f"Opponent {_DID[action]}." for action in hand.done]
    if hand.turned:
        # In front of what an opponent who sits first has opened the round with.
        parts.insert(len(parts) - deal.seat, f"The common card is {deal.common}.")
    legal = [action.value for action in hand.state.legal]
    return f"{' '.join([*parts, ', '.join(legal[:-1]).capitalize()])} or {legal[-1]}?"
