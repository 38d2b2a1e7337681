"""`python -m sglang.launch_server` of a server that samples at random, for runs whose engine starts its own servers.

Found by the PYTHONPATH of `engine.server.environment`. What would have killed a real server is in its log. It ignores
SIGTERM, as a real one does for as long as it drains its requests.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
from typing import Any

from tests.engine.fleet.fakes import FakeSglang
from tests.learner.support import VOCABULARY

CRIME = "CRIME"


class RandomSglang(FakeSglang):
    """Random tokens with log-prob -1. It does not look into the weights that it loads."""

    def __init__(self) -> None:
        chance = random.Random()
        super().__init__(says=lambda _: chance.randrange(VOCABULARY))

    async def _update_weights_from_disk(self, body: Any) -> Any:
        self.weights, self.label = 1, body["weight_version"]
        return {}


async def serve(port: int) -> None:
    server, told = RandomSglang(), 0
    await server.start(port)
    while True:
        await asyncio.sleep(0.05)
        for crime in server.crimes[told:]:
            sys.stdout.write(f"{CRIME} {crime}\n")
            sys.stdout.flush()
        told = len(server.crimes)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    asyncio.run(serve(parser.parse_known_args()[0].port))


if __name__ == "__main__":
    main()
