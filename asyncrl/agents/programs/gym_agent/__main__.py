"""Plays text games that have `reset` and `step`. They come from textarena, gem or your own code, which must be
installed in the Python that runs this file. That Python does not need asyncrl.

    PYTHON gym_agent tasks GAME [--args JSON] [--limit 1000]         writes tasks as JSON lines
    PYTHON gym_agent                                   plays episodes, as the program of `actor.agent_command`

GAME is `textarena:ID`, `gem:ID`, or MODULE:FUNCTION. The function makes a game with Gymnasium's methods, whose
observations and actions are texts. A task is a seed of the game. The game's observation becomes the user's turn, and
the text of the policy's answer becomes the action.

Games use random generators that the whole process shares, so a process plays one episode at a time. The hash seed is
fixed, so that sets of texts have the same order in every process.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import os
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

FIELD = "gym"
"""The field of a task's `extra_info` that names its game: JSON text with `game`, `args` and `seed`."""

REWARD = "reward"
FULL = ("context_length_exceeded", "turn_limit")
"""Error codes with which the endpoint refuses a request because the conversation has no room for another turn."""

HASH_SEED = "PYTHONHASHSEED"
WAIT_S = 24 * 3600
"""The maximum seconds that a request waits for an answer of the policy's endpoint. The limit can be high, because the
actor ends an episode that takes too long."""


class GameError(Exception):
    """The game cannot be played, or an episode failed and has no reward."""


class GameStep(NamedTuple):
    text: str
    reward: float | None
    done: bool


class Game(Protocol):
    """One game. Either its steps have rewards, or `final` is the reward of the whole game."""

    def reset(self, seed: int) -> str:
        """Begin the game. Returns the first observation."""

    def step(self, action: str) -> GameStep: ...

    def final(self) -> float | None:
        """The reward of the whole game; None if its steps have rewards, or if it is not over."""

    def close(self) -> None: ...


class TextArenaGame:
    """A game of textarena for one or several players. The policy is player number `player` (counted from 0) of
    `players` players.

    `opponent`, MODULE:NAME, plays for all other players. It is a function that gets the text that a player reads and
    returns the player's action, or a class whose objects can be called in this way. Each game makes its own object of
    the class.
    """

    def __init__(self, name: str, opponent: str | None = None, player: int = 0, players: int = 1, **args: Any) -> None:
        import textarena

        self._name = name
        self._game = textarena.make(name, **args)
        self._inner = self._game
        # The wrappers are removed. They would repeat the whole history in each observation, but the conversation
        # already has it.
        while isinstance(self._inner, textarena.Wrapper):
            self._inner = self._inner.env
        self._own_action = textarena.ObservationType.PLAYER_ACTION
        found = _function(opponent) if opponent else None
        self._others = found() if isinstance(found, type) else found
        self._player, self._players = player, players
        self._done = False

    def reset(self, seed: int) -> str:
        try:
            self._game.reset(num_players=self._players, seed=seed)
        except AssertionError as error:
            raise GameError(
                f"{self._name} does not begin with {self._players} players ({error}); give players, player and "
                "opponent in --args"
            ) from error
        if self._players > 1 and self._others is None:
            raise GameError(f"{self._name} has {self._players} players; give the other players an opponent in --args")
        return self._until_own_turn()

    def step(self, action: str) -> GameStep:
        self._done, _ = self._game.step(action=action)
        text = "" if self._done else self._until_own_turn()
        return GameStep(text, None, self._done)

    def final(self) -> float | None:
        if not self._done:
            return None
        rewards, _ = self._game.close()
        return float(rewards[self._player])

    def close(self) -> None:
        pass

    def _until_own_turn(self) -> str:
        """Let the other players play until it is the policy's turn. Returns the text that the policy then reads."""
        while True:
            player, observation = self._inner.get_observation()
            if player == self._player or self._done:
                return self._text(observation, self._player)
            if self._others is None:
                raise GameError(f"{self._name} needs a move of player {player}; give an opponent in --args")
            self._done, _ = self._game.step(action=str(self._others(self._text(observation, player))))
            if self._done:
                return ""

    def _text(self, observation: Any, reader: int) -> str:
        """The messages of the game and of other players since the reader's last turn."""
        if isinstance(observation, str):
            return observation
        lines = []
        for sender, message, kind in observation:
            if sender == reader and kind == self._own_action:
                continue
            lines.append(message if sender < 0 else f"[Player {sender}] {message}")
        return "\n".join(lines)


class GymnasiumGame:
    """A game with Gymnasium's `reset` and `step`. If a game of gem gives `info["suffix"]`, it is added to the
    observation."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def reset(self, seed: int) -> str:
        observation, info = self._environment.reset(seed=seed)
        return _with_suffix(observation, info)

    def step(self, action: str) -> GameStep:
        observation, reward, terminated, truncated, info = self._environment.step(action)
        return GameStep(_with_suffix(observation, info), float(reward), bool(terminated or truncated))

    def final(self) -> float | None:
        return None

    def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if callable(close):
            close()


def _with_suffix(observation: Any, info: Any) -> str:
    if not isinstance(observation, str):
        raise GameError(f"the game's observation is {observation!r:.100}; only games of texts can be played")
    suffix = info.get("suffix") if isinstance(info, Mapping) else None
    return f"{observation.rstrip()}\n{suffix}" if isinstance(suffix, str) and suffix else observation


def open_game(name: str, arguments: Mapping[str, Any]) -> Game:
    """Make a game. Raises GameError: it cannot be made."""
    kind, _, rest = name.partition(":")
    try:
        if kind == "textarena":
            return TextArenaGame(rest, **arguments)
        if kind == "gem":
            import gem

            return GymnasiumGame(gem.make(rest, **arguments))
        return GymnasiumGame(_function(name)(**arguments))
    except GameError:
        raise
    except ModuleNotFoundError as error:
        if kind not in ("textarena", "gem") or error.name != kind:
            raise GameError(f"{name} cannot be made: {type(error).__name__}: {error}") from error
        raise GameError(
            f"{name}: {kind} is not installed in the Python {sys.executable} (docs/environments.md)"
        ) from error
    except Exception as error:
        raise GameError(f"{name} cannot be made: {type(error).__name__}: {error}") from error


def _function(path: str) -> Any:
    """The object at MODULE:NAME. Raises GameError: it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise GameError(
            f"{path} cannot be imported ({error}); give MODULE:NAME, with its folder on PYTHONPATH"
        ) from error


def rows(name: str, arguments: str, first: int, limit: int) -> Iterator[dict[str, Any]]:
    """Yield a row of a task file for each of the `limit` seeds from `first` on. Raises GameError: the game fails."""
    args = json.loads(arguments)
    for seed in range(first, first + limit):
        game = open_game(name, args)
        text = game.reset(seed)
        game.close()
        yield {
            "prompt": [{"role": "user", "content": text}],
            "data_source": f"{FIELD}/{name}",
            "reward_model": {"ground_truth": ""},
            "extra_info": {
                "index": seed,
                "split": "seed",
                FIELD: json.dumps({"game": name, "args": args, "seed": seed}),
            },
        }


class PolicyConnection:
    """Requests the policy's turns in one episode from the actor's endpoint."""

    def __init__(self, base_url: str, key: str) -> None:
        self._turns = 0
        address = urllib.parse.urlsplit(base_url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        self._server = kind(address.netloc, timeout=WAIT_S)
        self._path = f"{address.path}/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def answer(self, messages: list[Mapping[str, Any]]) -> tuple[Mapping[str, Any], bool] | None:
        """Request the policy's next turn. Returns the turn, and true if it was cut at its length limit. Returns None if
        the conversation has no room for a further turn. Raises GameError: the request was refused."""
        self._server.request("POST", self._path, json.dumps({"messages": messages}), self._headers)
        response = self._server.getresponse()
        body = json.load(response)
        if response.status == 200:
            self._turns += 1
            [choice] = body["choices"]
            return choice["message"], choice["finish_reason"] == "length"
        error = body.get("error", {})
        if error.get("code") in FULL and self._turns:
            return None
        raise GameError(f"the policy's endpoint refused a request: {error.get('message', body)!s:.500}")

    def close(self) -> None:
        self._server.close()


def play(task: Mapping[str, Any], base_url: str, key: str) -> dict[str, Any]:
    """Play one episode. Returns its rewards, metrics and rewards of turns. Raises GameError: the episode failed."""
    try:
        given = json.loads(task["extra_info"][FIELD])
        name, arguments, seed = given["game"], given["args"], given["seed"]
    except (KeyError, TypeError, ValueError):
        raise GameError(f"the task is not from `asyncrl data gym`: extra_info.{FIELD} is missing") from None
    game, policy = open_game(name, arguments), PolicyConnection(base_url, key)
    try:
        first = game.reset(seed)
        *before, written = task["messages"]
        turns, done = _converse(game, policy, [*before, {"role": "user", "content": first}])
        final = game.final()
    finally:
        policy.close()
        game.close()
    metrics = {"unfinished": float(not done), "other_prompt": float(first != written["content"])}
    scored = any(reward is not None for reward in turns)
    return {"rewards": {REWARD: final or 0.0} if not scored else {}, "turns": turns, "metrics": metrics}


def _converse(
    game: Game, policy: PolicyConnection, messages: list[Mapping[str, Any]]
) -> tuple[list[float | None], bool]:
    """Let policy and game take turns. Returns the rewards of turns, and true if the game is over."""
    turns: list[float | None] = []
    while found := policy.answer(messages):
        message, cut = found
        turns.append(None)
        if cut:
            break
        step = game.step(message["content"] or "")
        turns[-1] = step.reward
        if step.done:
            return turns, True
        messages += [message, {"role": "user", "content": step.text}]
    return turns, False


def _own_streams() -> tuple[Any, Any]:
    """Keep stdin and stdout for this program. From now on, what games print goes to stderr, and their input is
    empty."""
    # If a game read this program's input, it would take away the line of the next episode.
    given, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return given, out


def _serve_episodes(given: Any, out: Any) -> None:
    for line in given:
        request = json.loads(line)
        try:
            outcome = play(request["task"], request["base_url"], request["api_key"])
        except Exception as error:  # noqa: BLE001 - one episode fails alone
            outcome = {"error": str(error) if isinstance(error, GameError) else f"{type(error).__name__}: {error}"}
        out.write(json.dumps(outcome) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="gym_agent", description=__doc__.split("\n\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command")
    tasks = commands.add_parser("tasks", help="write tasks of a game as JSON lines")
    tasks.add_argument("game")
    tasks.add_argument("--args", default="{}")
    tasks.add_argument("--first", type=int, default=0)
    tasks.add_argument("--limit", type=int, default=1000)
    given = parser.parse_args()
    if os.environ.get(HASH_SEED) != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, HASH_SEED: "0"})
    lines, out = _own_streams()
    if given.command is None:
        _serve_episodes(lines, out)
        return
    try:
        for row in rows(given.game, given.args, given.first, given.limit):
            out.write(json.dumps(row) + "\n")
    except GameError as error:
        out.write(json.dumps({"error": str(error)}) + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
