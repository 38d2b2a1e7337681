"""A whole run in processes with images in tasks and in later turns, over a real server: actor and learner are killed in
mid-run, the run is resumed, and its model loads with transformers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from asyncrl.data.writing import write_tasks
from asyncrl.modelling.images import digest_of
from asyncrl.replay.stored import StoredRun
from asyncrl.types import Task, Trajectory
from tests.end_to_end.support import Run
from tests.helpers import make_task
from tests.sglang.support import RealServer
from tests.sglang.test_images import PATCH, PROGRAM
from tests.vision import encoded, save_wide_vision_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

STEPS, MORE_STEPS, BATCH, GROUP = 9, 2, 8, 4
MAX_LAG = 2
START_S = 400.0


def picture(seed: int) -> bytes:
    """An image file of a size that no processor changes: the learner's and SGLang's resize by other code."""
    return encoded((4 * PATCH, 6 * PATCH) if seed % 2 else (8 * PATCH, 4 * PATCH), seed)


async def look(task: Task, base_url: str, api_key: str) -> Mapping[str, float]:
    """An agent that shows the task's image, and then another one."""
    [question] = task.messages
    parts = [_part(block.get("image") or block["text"]) for block in question["content"]]
    messages = [{"role": "user", "content": parts}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        for _ in range(2):
            body = {"messages": messages, "max_tokens": 12}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                reason = "" if response.ok else await response.text()
                if "placeholder" in reason:
                    break  # the policy has sampled the mark of an image or of a video
                assert response.status == 200, reason
                answer = (await response.json())["choices"][0]["message"]
            second = picture(100 + int(task.extra_info["index"]))
            messages += [answer, {"role": "user", "content": [_part("And this? "), _part(second)]}]
    return {}


def _part(shown: str | bytes) -> dict[str, Any]:
    if isinstance(shown, str):
        return {"type": "text", "text": shown}
    url = f"data:image/png;base64,{base64.b64encode(shown).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def score(task: Task, answer: str, trajectory: Trajectory) -> float:
    """Something of which the members of a group have different amounts."""
    return float((trajectory.tokens[trajectory.loss_mask] % 2 == 0).mean())


def tasks() -> list[Task]:
    def of(index: int) -> Task:
        content = [{"type": "text", "text": "What is it? "}, {"type": "image", "image": picture(index)}]
        message = {"role": "user", "content": content}
        return make_task(index, messages=[message], data_source="shown", extra_info={"index": index})

    return [of(index) for index in range(16)]


def settings(folder: Path, url: str) -> list[str]:
    return [
        *(f"data.train={folder / 'tasks.parquet'}", f"model.path={folder / 'model'}", "model.dtype=float32"),
        *("model.compile=false", "engine=sglang", f"engine.urls=[{url}]", "engine.check_s=1", "cluster.gpus=0"),
        *("cluster.actors=1", f"actor.agent={__name__}.look", "actor.concurrency=8", "actor.max_turns=2"),
        *("actor.max_turn_tokens=12", "actor.max_tokens=256", "actor.max_total_tokens=512"),
        *(f"scoring.rule={__name__}.score", "learner.micro_tokens=1024", f"replay.max_lag={MAX_LAG}"),
        *("replay.retention=all", "replay.lease_s=10", "learner.checkpoint_every=2", "learner.eval_every=0"),
        *(f"learner.batch_size={BATCH}", f"learner.group_size={GROUP}", "learner.lr=1e-3"),
    ]


def test_a_run_with_images_loses_nothing_to_kills_resumes_and_exports_a_model_that_loads(tmp_path: Path) -> None:
    save_wide_vision_model(tmp_path / "model")
    write_tasks(tmp_path / "tasks.parquet", tasks())
    server = RealServer(tmp_path / "model", tmp_path / "server.log", program=PROGRAM)
    try:
        asyncio.run(asyncio.wait_for(server.ready(), START_S))
        arguments = settings(tmp_path, server.url)
        with Run("train", tmp_path, *arguments, f"learner.steps={STEPS}") as run:
            for victim in ("actor-0", "learner"):
                run.wait_for_step(run.newest_step() + 2, START_S)
                run.kill(victim)
            run.finish(START_S)
            check(run, STEPS, 1)
        with Run("train", tmp_path, *arguments, f"learner.steps={STEPS + MORE_STEPS}", "replay.max_lag=0") as run:
            run.finish(START_S)
            check(run, STEPS + MORE_STEPS, MORE_STEPS)
    finally:
        server.kill()
    exported = AutoModelForImageTextToText.from_pretrained(run.dir / "model")
    initial = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").state_dict()
    changed = {name for name, each in exported.state_dict().items() if not torch.equal(each, initial[name])}
    assert any("visual" in name for name in changed)
    assert any("language_model" in name for name in changed)
    assert AutoImageProcessor.from_pretrained(run.dir / "model", backend="pil").patch_size == PATCH


def check(run: Run, steps: int, least: int) -> None:
    """Check that nothing is lost or trained twice, and that every trajectory has its images.

    At least `least` steps have no older episodes. In these, the learner computes the log-probs with which the server
    sampled after the images.
    """
    lines = {line["step"]: line for line in run.steps()}
    assert sorted(lines) == list(range(steps))
    of_own_version = [line for line in lines.values() if line["lag/max"] == 0]
    assert len(of_own_version) >= least
    for line in of_own_version:
        assert abs(line["mismatch/k3"]) < 1e-6, line
        assert line["mismatch/agree"] > 0.9, line
    in_two_turns = 0
    with closing(StoredRun(run.dir / "replay")) as stored:
        audit, counters = stored.audit(uses=1), stored.counters()
        assert (audit["lost"], audit["trained_twice"]) == (0, 0), audit
        assert audit["planned"] == counters["trained"] == steps * BATCH
        for step in range(steps):
            plan = stored.plan(step)
            assert plan is not None
            for name in plan.ids:
                trajectory = stored.trajectory(name)
                assert trajectory is not None
                index = int(trajectory.task_id.rpartition("/")[2])
                expected = {digest_of(picture(seed)): picture(seed) for seed in (index, 100 + index)}
                names = set(trajectory.image_names)
                assert digest_of(picture(index)) in names <= expected.keys()
                in_two_turns += len(names) == 2
                assert all(stored.image(name, each) == expected[each] for each in names)
    assert in_two_turns > steps
