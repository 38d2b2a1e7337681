"""A game of two moves for `benchmarks.environments`. The program `gym_agent` plays it, and `python -m
benchmarks.text_game PORT` serves it with OpenEnv's protocol."""

from __future__ import annotations

import sys
from typing import Any

MOVES = 2


class TwoMoves:
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._moves = 0
        return "What is 5*3?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._moves += 1
        return "15", 0.5, self._moves == MOVES, False, {}


def main() -> None:
    from aiohttp import web

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"type": "object", "properties": {"message": {"type": "string"}}}})

    async def play(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        game = TwoMoves()
        async for received in socket:
            message = received.json()
            reward: float | None = None
            if message["type"] == "reset":
                (hint, _), done = game.reset(0), False
            else:
                hint, reward, done, *_ = game.step(message["data"]["message"])
            observed = {"observation": {"hint": hint}, "reward": reward, "done": done}
            await socket.send_json({"type": "observation", "data": observed})
        return socket

    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", play)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
