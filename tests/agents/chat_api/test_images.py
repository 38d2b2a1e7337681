"""Images in the messages of agents: by all protocols they are one branch, and nothing reads files of the actor."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import ImagesConfig
from asyncrl.episode import images as actor_images
from asyncrl.episode import recorder
from asyncrl.episode.images import ImageDesk
from asyncrl.modelling.images import digest_of
from tests.agents.chat_api.support import LIMITS, Agent, episode, says, user
from tests.episode.fakes import call
from tests.vision import PATCH, encoded, vision_desk, vision_tokenizer

pytestmark = pytest.mark.slow

SQUARE = encoded((4 * PATCH, 4 * PATCH), 1)
WIDE = encoded((8 * PATCH, 4 * PATCH), 2)
TOKENIZER = vision_tokenizer()
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
RECORDED = sorted((Path(__file__).parent / "recorded_images").glob("*.json"))
LONG = replace(LIMITS, max_tokens=20_000)
FUNCTION = {"name": "echo", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ImageDesk:
    return vision_desk(tmp_path_factory.mktemp("model"))


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def asks(*parts: Any) -> dict[str, Any]:
    return user([{"type": "text", "text": each} if isinstance(each, str) else each for each in parts])  # type: ignore[arg-type]


async def by_chat_completions(agent: Agent) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    messages = [asks("What is it? ", part(data_url(SQUARE)))]
    answer = await agent.ask(*messages, tools=tools)
    [made] = answer["tool_calls"]
    shown = [{"type": "text", "text": "seen "}, part(data_url(WIDE))]
    messages += [answer, {"role": "tool", "tool_call_id": made["id"], "content": shown}]
    assert (await agent.ask(*messages, tools=tools))["content"] == "Wide."


async def by_responses(agent: Agent) -> None:
    tools = [{"type": "function", **FUNCTION}]
    image = {"type": "input_image", "image_url": data_url(SQUARE)}
    first = {"role": "user", "content": [{"type": "input_text", "text": "What is it? "}, image]}
    _, answer = await agent.send(path="responses", json={"input": [first], "tools": tools})
    [made] = answer["output"]
    shown = [{"type": "input_text", "text": "seen "}, {"type": "input_image", "image_url": data_url(WIDE)}]
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": shown}
    more = {"input": [result], "previous_response_id": answer["id"], "tools": tools}
    status, answer = await agent.send(path="responses", json=more)
    assert (status, answer["output"][0]["content"][0]["text"]) == (200, "Wide.")


async def by_messages(agent: Agent) -> None:
    tools = [{"name": "echo", "input_schema": PARAMETERS}]

    def block(data: bytes) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
        return {"type": "image", "source": source}

    first = {"role": "user", "content": [{"type": "text", "text": "What is it? "}, block(SQUARE)]}
    body = {"max_tokens": 100, "tools": tools}
    _, answer = await agent.send(path="messages", json={**body, "messages": [first]})
    [made] = answer["content"]
    shown = [{"type": "text", "text": "seen "}, block(WIDE)]
    result = {"type": "tool_result", "tool_use_id": made["id"], "content": shown}
    turns = [{"role": "assistant", "content": [made]}, {"role": "user", "content": [result]}]
    status, answer = await agent.send(path="messages", json={**body, "messages": [first, *turns]})
    assert (status, answer["content"][0]["text"]) == (200, "Wide.")


@pytest.mark.parametrize("protocol", [by_chat_completions, by_responses, by_messages])
async def test_images_of_questions_and_results_are_one_branch_by_every_protocol(
    desk: ImageDesk, protocol: Callable[[Agent], Any]
):
    async with episode([call("x"), "Wide."], tokenizer=TOKENIZER, images=desk) as agent:
        await protocol(agent)
    assert len(agent.trajectory.branches) == 1
    assert agent.trajectory.image_names == [digest_of(SQUARE), digest_of(WIDE)]
    assert [[each.data for each in given] for given in agent.engine.images] == [[SQUARE], [SQUARE, WIDE]]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
async def test_the_requests_with_images_of_a_real_client_make_one_branch(desk: ImageDesk, path: Path):
    recorded = json.loads(path.read_text())
    async with episode(recorded["turns"], LONG, TOKENIZER, images=desk) as agent:
        for request in recorded["requests"]:
            status, answer = await agent.send(path=request["path"], json=request["body"])
            assert status == 200, answer
    assert len(agent.trajectory.branches) == 1
    assert [len(given) for given in agent.engine.images] == recorded["images"]
    assert len(agent.trajectory.image_names) == recorded["images"][-1]


async def test_an_image_by_url_is_fetched_once_an_episode_and_by_permission_only(desk: ImageDesk):
    fetched: list[str] = []

    async def fetch(url: str, limit: int) -> bytes:
        fetched.append(url)
        return SQUARE if len(fetched) == 1 else WIDE

    asked = asks(part("https://example.org/a.png"))
    permitted = replace(desk, config=ImagesConfig(urls=True), fetch=fetch)
    async with episode(["One.", "Two."], tokenizer=TOKENIZER, images=permitted) as agent:
        await agent.ask(asked)
        await agent.ask(asked, says("One."), user("And now?"))
    assert fetched == ["https://example.org/a.png"]
    assert len(agent.trajectory.branches) == 1
    async with episode(["One."], tokenizer=TOKENIZER, images=desk) as agent:
        assert "data.images.urls" in (await agent.refusal(asked))["message"]
        await agent.ask(user("x"))


async def test_no_request_shows_a_file_of_the_actor_or_what_is_no_image(desk: ImageDesk, tmp_path: Any):
    (tmp_path / "a.png").write_bytes(SQUARE)
    permitted = replace(desk, config=ImagesConfig(folders=[str(tmp_path)]))
    async with episode(["One."], tokenizer=TOKENIZER, images=permitted) as agent:
        for source in ["a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", "", None, 5, {"url": {}}]:
            content = [{"type": "image_url", "image_url": source if isinstance(source, dict) else {"url": source}}]
            assert "must be a data: URL" in (await agent.refusal(user(content)))["message"]  # type: ignore[arg-type]
            items = [{"role": "user", "content": [{"type": "input_image", "image_url": source}]}]
            status, answer = await agent.send(path="responses", json={"input": items})
            assert (status, "must be a data: URL" in answer["error"]["message"]) == (400, True)
        for url, reason in [
            (data_url(b"no image"), "none of the formats PNG"),
            ("data:image/png,abc", "without base64"),
            ("data:image/png;base64,?", "damaged data: URL"),
        ]:
            assert reason in (await agent.refusal(asks(part(url))))["message"]
        for forged in [{"type": "image", "digest": digest_of(SQUARE).hex()}, {"type": "image", "image": "a.png"}]:
            assert "types image cannot" in (await agent.refusal(asks(forged)))["message"]
        turn = says([part(data_url(SQUARE))])  # type: ignore[arg-type]
        assert "the policy's own turns have no images" in (await agent.refusal(user("x"), turn, user("y")))["message"]
        file = {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}
        status, answer = await agent.send(path="responses", json=file)
        assert (status, "files are not stored" in answer["error"]["message"]) == (400, True)
        await agent.ask(user("x"))
    assert agent.trajectory.image_names == []
    async with episode(["One."], tokenizer=TOKENIZER) as agent:
        assert "a model that reads images" in (await agent.refusal(asks(part(data_url(SQUARE)))))["message"]
        await agent.ask(user("x"))


async def test_more_images_than_a_trajectory_may_have_are_refused_by_their_limit_and_the_agent_may_go_on(
    desk: ImageDesk, monkeypatch: pytest.MonkeyPatch
):
    for module in (recorder, actor_images):
        monkeypatch.setattr(module, "MAX_IMAGES", 2)
    urls = [data_url(encoded((4 * PATCH, 4 * PATCH), seed)) for seed in range(3)]
    async with episode(["One.", "Two."], tokenizer=TOKENIZER, images=desk) as agent:
        await agent.ask(asks(part(urls[0]), part(urls[1])))
        for many in ([asks(*map(part, urls))], [asks(part(urls[2]))], [asks(part(urls[0]))]):
            assert (await agent.refusal(*many))["code"] == "image_limit"
        first = asks(part(urls[0]), part(urls[1]))
        await agent.ask(first, says("One."), user("And now?"))
    assert len(agent.trajectory.image_names) == 2
    assert agent.trajectory.finish == "completed"


async def test_the_length_of_an_images_file_is_no_length_of_the_conversation(desk: ImageDesk):
    large = encoded((8 * PATCH, 8 * PATCH), 3)
    question = asks("What?", *[part(data_url(large + bytes(60_000)))] * 4)
    async with episode(["One."], tokenizer=TOKENIZER, images=desk) as agent:
        await agent.ask(question)
    assert len(agent.trajectory.image_names) == 4


async def test_responses_that_are_kept_share_the_images_that_each_request_repeats(desk: ImageDesk):
    image = {"type": "input_image", "image_url": data_url(SQUARE)}
    items: list[Any] = [{"role": "user", "content": [image]}]
    async with episode(["One.", "Two.", "Three."], tokenizer=TOKENIZER, images=desk) as agent:
        await agent.address
        [endpoint] = agent.player._server._endpoints.values()
        for text in ("One.", "Two.", "Three."):
            status, answer = await agent.send(path="responses", json={"input": items})
            assert (status, answer["output"][0]["content"][0]["text"]) == (200, text)
            items += [*answer["output"], {"role": "user", "content": "And now?"}]
        kept = [each[0]["content"][0]["image_url"]["url"] for each in endpoint.conversations.values()]
        assert len(kept) == 3
        assert all(each is kept[0] for each in kept)
    assert len(agent.trajectory.branches) == 1
