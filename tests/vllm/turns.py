"""A task of the tests: to every second prompt an environment answers two turns, the third one ends the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from app.tasks.base import Prompt, Reply

TURNS = 3


class Turns:
    """`MultiTurnTask`. The reward is the number of turns."""

    name, train_size, heldout_size = "turns", 50, 10

    def __init__(self, params: Mapping[str, JsonValue], seed: int) -> None:
        del params, seed

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`."""
        return Prompt(index, f"Count on from {index}.", {})

    def heldout(self, index: int) -> Prompt:
        """Held-out prompt number `index`."""
        return Prompt(index, f"Count down from {index}.", {})

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Reply | None:
        """Nothing, to prompts with an odd number."""
        return None if prompt.index % 2 or len(turns) == TURNS else Reply(said(len(turns)))

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        """Of one turn."""
        return self.episode_reward(prompt, [completion_text])

    def episode_reward(self, prompt: Prompt, turns: Sequence[str]) -> float:
        """Whatever was written."""
        del prompt
        return float(len(turns))


def said(turns: int) -> str:
    """What the environment says after so many turns."""
    return f"<turn {turns} is over>"
