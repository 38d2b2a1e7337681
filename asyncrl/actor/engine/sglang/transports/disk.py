"""A Hugging Face folder that the server can read: the learner's own, or one that the actor writes."""

from __future__ import annotations

from asyncrl.actor.engine.fleet.update import Update
from asyncrl.actor.engine.sglang.transports.base import Transport


class DiskTransport(Transport):
    """Names the folder to `/update_weights_from_disk`, which needs no begin and end."""

    async def send(self, update: Update) -> None:
        async with update.folder() as folder:
            body = {"model_path": str(folder), "weight_version": update.label, "flush_cache": False}
            await self.end.post("/update_weights_from_disk", body)
