"""TextArena's games for one player, by name: pip install "marlhf[textarena]"."""

from __future__ import annotations

import random
import threading
from typing import Any

from marlhf.data.rows import Message, Row
from marlhf.environments.protocol import ConversationError, Step

GAME = threading.Lock()
"""Games draw from Python's own random numbers, so one moves at a time, each with its own state."""


class TextArena:
    """A game such as `Mastermind-v0`; the row's prompt is not used.

    The reward is the game's, for the turn that ends it. A game that takes the whole score counts
    as a success.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        try:
            import textarena
        except ModuleNotFoundError as error:
            raise ConversationError(
                f"textarena:{name} needs the package {error.name}: pip install 'marlhf[textarena]'."
            ) from error
        raw = f"{name}-raw"  # the game alone, without wrappers that repeat what was said before
        if raw not in textarena.envs.registration.ENV_REGISTRY:
            raise ConversationError(
                f"TextArena has no game {name!r}. Its list: python -c 'import textarena as t; "
                "t.pprint_registry_detailed()'."
            )
        self._name, self._random = name, random.Random()
        try:
            self._game = textarena.make(raw, **settings)
        except Exception as error:  # some want nltk's words, or a key of a service
            raise ConversationError(
                f"TextArena's {name} cannot be set up: {type(error).__name__}: {error}"
            ) from error

    def reset(self, row: Row, seed: int) -> list[Message]:
        def reset() -> None:
            random.seed(seed)
            self._game.reset(num_players=1, seed=seed)

        try:
            self._play(reset)
        except AssertionError as error:
            raise ConversationError(
                f"TextArena's {self._name} cannot be played by one player: {error}"
            ) from error
        return [self._said()]

    def step(self, reply: str) -> Step:
        done, _ = self._play(lambda: self._game.step(action=reply))
        if not done:
            return Step([self._said()], success=False)
        rewards, _ = self._play(self._game.close)
        reward = float((rewards or {}).get(0, 0.0))
        return Step([self._said()], reward=reward, done=True, success=reward >= 1)

    def _said(self) -> Message:
        """What the game said since the last turn, without the player's own words."""
        _, seen = self._play(self._game.get_observation)
        text = "\n".join(str(text) for speaker, text, _ in seen if speaker != 0)
        return {"role": "user", "content": text or "(nothing)"}

    def _play(self, move: Any) -> Any:
        with GAME:
            before = random.getstate()
            random.setstate(self._random.getstate())
            try:
                return move()
            finally:
                self._random.setstate(random.getstate())
                random.setstate(before)
