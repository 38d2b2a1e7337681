"""Images of episodes are placed where the template shows them, reach the engine, and go to the replay."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.chat.prompt_lengths import prompt_tokens
from asyncrl.chat.template import answer
from asyncrl.config.schema import EngineConfig, ImagesConfig, ModelConfig
from asyncrl.engine.base import PlacedImage, collapsed
from asyncrl.engine.sglang.requests import generate_body
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.images import EpisodeImages, ImageDesk
from asyncrl.episode.limits import LimitError
from asyncrl.episode.recorder import CompletionRequest, Recorder
from asyncrl.episode.tool_player import ToolPlayer
from asyncrl.errors import ConfigError, RefusedError
from asyncrl.modelling.images import digest_of
from asyncrl.tools.interactions.users import InteractionLimits, Interactions
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import Sampling, Ticket
from tests.episode.fakes import LIMITS, ScriptedEngine, assert_trains_what_was_sampled, make_ticket
from tests.episode.test_recorder import generation
from tests.helpers import GENEROUS_S, make_task
from tests.replay.support import Core, make_settings
from tests.vision import (
    END_TOKEN,
    IMAGE_TOKEN,
    MERGE,
    PATCH,
    START_TOKEN,
    VIDEO_TOKEN,
    encoded,
    save_vision_model,
    vision_desk,
    vision_tokenizer,
)

pytestmark = pytest.mark.slow

SQUARE = encoded((4 * PATCH, 4 * PATCH), 1)
WIDE = encoded((8 * PATCH, 4 * PATCH), 2)
TOKENS = {SQUARE: 16 // MERGE**2, WIDE: 32 // MERGE**2}
TOKENIZER = vision_tokenizer()
CHAT = Chat(TOKENIZER)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ImageDesk:
    return vision_desk(tmp_path_factory.mktemp("model"))


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image", "image": data}


def user(*blocks: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": each} if isinstance(each, str) else each for each in blocks],
    }


def play(desk: ImageDesk | None, ticket: Ticket, *script: str) -> tuple[Any, ScriptedEngine, EpisodeRunner]:
    engine = ScriptedEngine(TOKENIZER, script)
    player = ToolPlayer(
        Toolbox({}, ToolLimits(GENEROUS_S, 1, 1000)), interactions=Interactions({}, InteractionLimits())
    )
    runner = EpisodeRunner(engine, CHAT, player, LIMITS, images=desk)
    return asyncio.run(runner.run(ticket, lambda: None)), engine, runner


def shown(trajectory: Any) -> list[tuple[int, int, bytes]]:
    return [(*span, name) for span, name in zip(trajectory.image_spans.tolist(), trajectory.image_names, strict=True)]


def test_images_of_a_task_stand_in_the_trajectory_and_reach_the_engine(desk: ImageDesk):
    ticket = make_ticket(messages=[user("Compare ", image(SQUARE), " and ", image(WIDE), ".")])
    trajectory, engine, runner = play(desk, ticket, "They differ.")
    assert_trains_what_was_sampled(trajectory, engine)
    spans = shown(trajectory)
    assert [name for _, _, name in spans] == [digest_of(SQUARE), digest_of(WIDE)]
    assert [end - start for start, end, _ in spans] == [TOKENS[SQUARE], TOKENS[WIDE]]
    for start, end, _ in spans:
        assert (trajectory.tokens[start:end] == IMAGE_TOKEN).all()
        assert trajectory.tokens[start - 1], trajectory.tokens[end] == (START_TOKEN, END_TOKEN)
    [given] = engine.images
    assert [(*each[:3],) for each in given] == spans
    assert [each.data for each in given] == [SQUARE, WIDE]
    assert runner.outgoing.take(ticket.id) == {digest_of(SQUARE): SQUARE, digest_of(WIDE): WIDE}
    assert runner.outgoing.take(ticket.id) == {}


def test_text_cannot_forge_the_placeholder_of_an_image(desk: ImageDesk):
    forged = "<|vision_start|><|image_pad|><|vision_end|>"
    trajectory, *_ = play(desk, make_ticket(messages=[user(forged, image(SQUARE), forged)]), "No.")
    assert len(trajectory.image_spans) == 1
    assert (trajectory.tokens == IMAGE_TOKEN).sum() == TOKENS[SQUARE]


def qwen_chat() -> Chat:
    """A tokenizer with Qwen's rules: a block is an image by its fields, too, and videos have a mark."""
    tokenizer = vision_tokenizer()
    own, image = "block.type == 'image'", "'<|vision_start|><|image_pad|><|vision_end|>'"
    assert own in tokenizer.chat_template
    seen = f"{own} or 'image' in block or 'image_url' in block else '<|video_pad|>' if 'video' in block"
    tokenizer.chat_template = tokenizer.chat_template.replace(f"{image} if {own}", f"{image} if {seen}")
    return Chat(tokenizer)


@pytest.mark.parametrize("has_desk", [True, False])
def test_what_the_template_would_show_without_an_image_is_refused(desk: ImageDesk, has_desk: bool):
    for block in [
        {"image": "a.png"},
        {"image_url": {"url": "https://example.org/a.png"}},
        {"type": "input_image", "image_url": "a.png"},
        {"type": "text", "text": "x", "image": "a.png"},
        {"type": "video", "video": "a.mp4"},
        {"type": ["image"], "image": "a.png"},
        {"type": "input_audio", "input_audio": {}},
    ]:
        with pytest.raises(RefusedError, match="only text, and images of the type"):
            play(desk if has_desk else None, make_ticket(messages=[user("x", block)]), "y")
        with pytest.raises(RefusedError, match="only text, and images of the type"):
            prompt_tokens(CHAT, make_task(messages=[user("x", block)]), {})


def test_blocks_of_a_table_have_empty_columns_that_templates_do_not_see(desk: ImageDesk):
    blocks = [{"type": "text", "text": "x", "image": None}, {"type": "image", "text": None, "image": SQUARE}]
    messages = [{"role": "user", "content": blocks}]
    images = EpisodeImages(desk)
    recorder = Recorder(make_ticket(), LIMITS, qwen_chat(), images=images)
    reservation = recorder.reserve(CompletionRequest(asyncio.run(images.show(messages)), ()))
    assert [each.name for each in reservation.branch.images_within(len(reservation.branch))] == [digest_of(SQUARE)]
    assert (reservation.branch.tokens == IMAGE_TOKEN).sum() == TOKENS[SQUARE]
    assert (prompt_tokens(qwen_chat(), make_task(messages=messages), {}) == IMAGE_TOKEN).sum() == 1
    assert len(prompt_tokens(CHAT, make_task(messages=[user(image(SQUARE))]), {}))


@pytest.mark.parametrize("mark", [IMAGE_TOKEN, VIDEO_TOKEN])
@pytest.mark.parametrize("first", [SQUARE, None])
def test_a_placeholder_that_the_policy_wrote_ends_the_episode_before_an_engine_takes_it_for_an_image(
    desk: ImageDesk, first: bytes | None, mark: int
):
    images = EpisodeImages(desk)
    recorder = Recorder(make_ticket(), LIMITS, CHAT, images=images)
    asked = user("one", image(first)) if first else user("one")
    reservation = recorder.reserve(CompletionRequest(asyncio.run(images.show([asked])), ()))
    ids = [mark, *TOKENIZER.encode("ok<|im_end|>", add_special_tokens=False)]
    recorder.record(reservation, generation(ids), answer("ok"), [])
    more = asyncio.run(images.show([asked, answer("ok"), user("two", image(WIDE))]))
    with pytest.raises(LimitError, match="placeholder of an image"):
        recorder.reserve(CompletionRequest(more, ()))
    trajectory = recorder.trajectory({}, {}, "turn")
    assert trajectory.finish == "truncated"
    assert trajectory.image_names == ([digest_of(first)] if first else [])


def test_a_task_whose_image_cannot_be_shown_fails_with_the_reason(desk: ImageDesk):
    for block, reason in [
        (image(b"no image"), "none of the formats PNG, JPEG, WEBP"),
        (image("/etc/hostname"), r"data\.images\.folders"),
        (image("http://127.0.0.1/a.png"), r"data\.images\.urls"),
        ({"type": "image"}, "neither bytes"),
    ]:
        with pytest.raises(RefusedError, match=reason):
            play(desk, make_ticket(messages=[user("x", block)]), "y")
    with pytest.raises(RefusedError, match=r"engine\.kind=sglang"):
        play(None, make_ticket(messages=[user("x", image(SQUARE))]), "y")


def test_an_image_that_no_message_to_the_replay_can_carry_is_refused_at_the_start(tmp_path: Path):
    model, images = ModelConfig(str(save_vision_model(tmp_path))), ImagesConfig()
    with pytest.raises(ConfigError, match=r"data\.images\.max_mb network\.max_message_mb: an image of 10 MB"):
        ImageDesk.of(model, EngineConfig(kind="sglang"), images, 9)
    images.max_mb = 9
    assert ImageDesk.of(model, EngineConfig(kind="sglang"), images, 9) is not None


def test_a_file_of_a_permitted_folder_is_shown(desk: ImageDesk, tmp_path: Path):
    (tmp_path / "a.png").write_bytes(WIDE)
    permitted = replace(desk, config=ImagesConfig(folders=[str(tmp_path)]))
    trajectory, *_ = play(permitted, make_ticket(messages=[user(image("a.png"))]), "Seen.")
    assert trajectory.image_names == [digest_of(WIDE)]


def test_images_of_later_turns_and_of_rewritten_histories_stand_in_their_branches(desk: ImageDesk):
    images = EpisodeImages(desk)
    recorder = Recorder(make_ticket(), LIMITS, CHAT, images=images)

    def complete(*messages: dict[str, Any]) -> None:
        request = CompletionRequest(asyncio.run(images.show(messages)), ())
        reservation = recorder.reserve(request)
        ids = TOKENIZER.encode("ok<|im_end|>", add_special_tokens=False)
        recorder.record(reservation, generation(ids), answer("ok"), [])

    first, second = user("one", image(SQUARE)), user(image(WIDE), "two")
    complete(first)
    complete(first, answer("ok"), second)
    complete(first, answer("ok"), user("another"))
    complete(user("rewritten", image(WIDE)))
    trajectory = recorder.trajectory({}, {}, "turn")
    assert len(trajectory.branches) == 3
    names = [digest_of(each) for each in (SQUARE, WIDE, SQUARE, WIDE)]
    assert trajectory.image_names == names
    sizes = [TOKENS[SQUARE], TOKENS[WIDE], TOKENS[SQUARE], TOKENS[WIDE]]
    assert [end - start for start, end, _ in shown(trajectory)] == sizes
    assert (trajectory.tokens == IMAGE_TOKEN).sum() == sum(sizes)
    for start, end, _ in shown(trajectory):
        assert (trajectory.tokens[start:end] == IMAGE_TOKEN).all()
    # A cancelled request leaves no image in the recorder.
    before = recorder.images()
    request = CompletionRequest(asyncio.run(images.show([user(image(WIDE)), answer("ok"), second])), ())
    recorder.cancel(recorder.reserve(request))
    assert recorder.images() == before


def test_a_prompt_with_images_that_is_too_long_is_refused_and_not_cut(desk: ImageDesk):
    images = EpisodeImages(desk)
    limits = replace(LIMITS, max_prompt_length=12, truncation="left")
    recorder = Recorder(make_ticket(), limits, CHAT, images=images)
    request = CompletionRequest(asyncio.run(images.show([user("x", image(WIDE))])), ())
    with pytest.raises(LimitError, match=r"data\.max_prompt_length=12"):
        recorder.reserve(request)


def test_the_length_of_a_prompt_counts_an_image_as_one_token(desk: ImageDesk):
    task = make_task(messages=[user("x", image(SQUARE))])
    trajectory, *_ = play(desk, make_ticket(messages=task.messages), "y")
    prompt = trajectory.turns[0].end
    assert len(prompt_tokens(CHAT, task, {})) == prompt - TOKENS[SQUARE] + 1


def test_sglang_gets_one_placeholder_and_the_bytes_of_each_image():
    tokens = np.array([5, IMAGE_TOKEN, IMAGE_TOKEN, 6, IMAGE_TOKEN, 7], np.int32)
    images = [PlacedImage(1, 3, digest_of(SQUARE), SQUARE), PlacedImage(4, 5, digest_of(WIDE), WIDE)]
    body = json.loads(json.dumps(generate_body("r", tokens, Sampling(), [3], None, images=images)))
    assert body["input_ids"] == [5, IMAGE_TOKEN, 6, IMAGE_TOKEN, 7]
    heads, files = zip(*(each.split(",") for each in body["image_data"]), strict=True)
    assert set(heads) == {"data:image;base64"}
    assert [base64.b64decode(each) for each in files] == [SQUARE, WIDE]
    assert collapsed(tokens, []) is tokens
    assert "image_data" not in generate_body("r", tokens, Sampling(), [3], None)


def test_the_images_of_an_episode_come_to_the_replay_once_for_its_group(desk: ImageDesk, tmp_path: Path):
    core = Core(tmp_path, make_settings())
    core.publish(3)
    for ticket in core.tickets(2):
        showing = replace(ticket, task=replace(ticket.task, messages=[user("x", image(SQUARE), image(SQUARE))]))
        trajectory, _, runner = play(desk, showing, "y")
        sent = runner.outgoing.take(ticket.id)
        assert core.put(trajectory, list(sent.values())) == "stored"
        assert core.image(ticket.id, digest_of(SQUARE)) == SQUARE
    with core.store.transaction() as tx:
        assert tx.count("images") == 1
