"""Images in what tools, environments and simulated users say: they stand in later turns as the template shows them,
reach the engine there, and go to the replay with the trajectory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from asyncrl.chat.chat import Chat
from asyncrl.config.schema import ActorConfig, ImagesConfig
from asyncrl.engine.base import collapsed
from asyncrl.episode import images as actor_images
from asyncrl.episode import recorder
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.images import ImageDesk
from asyncrl.episode.tool_player import ToolPlayer
from asyncrl.errors import RefusedError, ToolError
from asyncrl.modelling.images import digest_of
from asyncrl.tools import Interaction, Response, Tool
from asyncrl.tools.environments.classes import environment_classes
from asyncrl.tools.environments.environments import Environments
from asyncrl.tools.interactions.users import InteractionLimits, Interactions
from asyncrl.tools.results import cut_content, joined, read_content
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import Role, Trajectory
from tests.episode.fakes import LIMITS, Script, ScriptedEngine, assert_trains_what_was_sampled, call, make_ticket
from tests.helpers import GENEROUS_S
from tests.vision import IMAGE_TOKEN, MERGE, PATCH, encoded, vision_desk, vision_tokenizer

pytestmark = pytest.mark.slow

SQUARE = encoded((4 * PATCH, 4 * PATCH), 1)
WIDE = encoded((8 * PATCH, 4 * PATCH), 2)
TOKENS = {SQUARE: 16 // MERGE**2, WIDE: 32 // MERGE**2}
TOKENIZER = vision_tokenizer()
CHAT = Chat(TOKENIZER)
SCHEMA = {"name": "look", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> ImageDesk:
    return vision_desk(tmp_path_factory.mktemp("model"))


def looking(answers: Mapping[str, Any]) -> Toolbox:
    """A tool `look`, which answers a text with what `answers` has for it."""

    class Look(Tool):
        schema = SCHEMA

        async def execute(self, arguments: Mapping[str, Any]) -> Any:
            return answers[arguments["text"]]

    return Toolbox({"look": Look}, ToolLimits(GENEROUS_S, 0, 1000))


def looks(text: str) -> str:
    return call(text, "look")


def block(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def play(
    desk: ImageDesk | None,
    toolbox: Toolbox | Environments,
    script: Script,
    chat: Chat = CHAT,
    users: Interactions | None = None,
    **task: Any,
) -> tuple[Trajectory, ScriptedEngine, dict[bytes, bytes]]:
    engine = ScriptedEngine(TOKENIZER, script)
    player = ToolPlayer(toolbox, interactions=users or Interactions({}, InteractionLimits()))
    runner = EpisodeRunner(engine, chat, player, LIMITS, images=desk)
    trajectory = asyncio.run(runner.run(make_ticket(**task), lambda: None))
    assert_trains_what_was_sampled(trajectory, engine)
    return trajectory, engine, runner.outgoing.take(trajectory.id)


def shown(trajectory: Trajectory) -> list[tuple[int, bytes]]:
    """The number of tokens that each image takes, and its digest."""
    sizes = (trajectory.image_spans[:, 1] - trajectory.image_spans[:, 0]).tolist()
    return list(zip(sizes, trajectory.image_names, strict=True))


def test_images_in_results_stand_where_the_template_shows_them_and_reach_the_engine_in_later_turns(desk: ImageDesk):
    toolbox = looking({"a": ["before ", block(SQUARE), " after"], "b": [block(WIDE), block(SQUARE)], "c": "none"})
    turns = [looks("a"), f"{looks('b')}\n{looks('c')}", "They differ."]
    trajectory, engine, sent = play(desk, toolbox, turns)
    names = [digest_of(each) for each in (SQUARE, WIDE, SQUARE)]
    assert shown(trajectory) == list(zip([TOKENS[SQUARE], TOKENS[WIDE], TOKENS[SQUARE]], names, strict=True))
    assert [[each.name for each in given] for given in engine.images] == [[], names[:1], names]
    assert sent == {digest_of(SQUARE): SQUARE, digest_of(WIDE): WIDE}
    for each in engine.images[-1]:
        assert (trajectory.tokens[each.start : each.end] == IMAGE_TOKEN).all()
    within = [
        turn for turn in trajectory.turns for start, _ in trajectory.image_spans if turn.start <= start < turn.end
    ]
    assert [turn.role for turn in within] == [Role.TOOL] * 3
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    text = CHAT.text(collapsed(trajectory.tokens, engine.images[-1]))
    assert f"<tool_response>\nbefore {mark} after\n</tool_response><|im_end|>" in text
    assert f"<tool_response>\n{mark}{mark}\n</tool_response>\n<tool_response>\nnone\n</tool_response>" in text


def test_the_tokens_of_an_episode_with_images_in_results_are_the_templates_own_rendering(desk: ImageDesk):
    trajectory, engine, _ = play(desk, looking({"a": ["x", block(WIDE)]}), [looks("a"), "Seen."], messages=[QUESTION])
    made = {"function": {"name": "look", "arguments": {"text": "a"}}}
    answered = {"role": "tool", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}
    assistant = {"role": "assistant", "content": "", "tool_calls": [made]}
    messages = [QUESTION, assistant, answered, {"role": "assistant", "content": "Seen."}]
    tools = [{"type": "function", "function": SCHEMA}]
    rendered = TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False)
    assert CHAT.text(collapsed(trajectory.tokens, engine.images[-1])) == rendered.removesuffix("\n")


QUESTION = {"role": "user", "content": "What is it?"}


def test_pictures_in_memory_become_files_that_show_the_same_pixels(desk: ImageDesk):
    picture = Image.open(io.BytesIO(SQUARE))
    pixels = np.asarray(picture)
    toolbox = looking({"a": picture, "b": [block(picture), "x"], "c": [block(pixels)], "d": picture.convert("RGBA")})
    trajectory, _, sent = play(desk, toolbox, [looks("a"), looks("b"), looks("c"), looks("d"), "Seen."])
    [file] = sent.values()
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(file))), pixels)
    assert shown(trajectory) == [(TOKENS[SQUARE], digest_of(file))] * 4


def test_a_file_that_a_tool_writes_again_is_read_again(desk: ImageDesk, tmp_path: Path):
    class Shoot(Tool):
        schema = SCHEMA

        async def execute(self, arguments: Mapping[str, Any]) -> Any:
            (tmp_path / "screen.png").write_bytes(SQUARE if arguments["text"] == "a" else WIDE)
            return [block("screen.png")]

    toolbox = Toolbox({"look": Shoot}, ToolLimits(GENEROUS_S, 0, 1000))
    permitted = replace(desk, config=ImagesConfig(folders=[str(tmp_path)]))
    trajectory, *_ = play(permitted, toolbox, [looks("a"), looks("b"), "Seen."])
    assert trajectory.image_names == [digest_of(SQUARE), digest_of(WIDE)]


def test_a_file_is_shown_by_the_permission_of_tasks_images(desk: ImageDesk, tmp_path: Path):
    (tmp_path / "a.png").write_bytes(WIDE)
    toolbox = looking({"a": [block("a.png")], "b": [block("/etc/hostname")]})
    permitted = replace(desk, config=ImagesConfig(folders=[str(tmp_path)]))
    trajectory, *_ = play(permitted, toolbox, [looks("a"), "Seen."])
    assert trajectory.image_names == [digest_of(WIDE)]
    with pytest.raises(RefusedError, match=r"data\.images\.folders"):
        play(permitted, toolbox, [looks("b"), "Seen."])


def test_what_cannot_be_shown_fails_the_episode_with_the_reason(desk: ImageDesk):
    for answer, error, reason in [
        ([block(b"no image")], RefusedError, "none of the formats PNG, JPEG, WEBP"),
        ([block("http://127.0.0.1/a.png")], RefusedError, r"data\.images\.urls"),
        ([block(np.zeros((2, 2, 7), np.uint8))], ToolError, "look answered with an image that cannot be saved"),
        (["a", 5], ToolError, "answered with list"),
    ]:
        with pytest.raises(error, match=reason):
            play(desk, looking({"a": answer}), [looks("a"), "Seen."])
    with pytest.raises(RefusedError, match=r"engine\.kind=sglang"):
        play(None, looking({"a": [block(SQUARE)]}), [looks("a"), "Seen."])


def test_a_template_that_shows_no_images_in_results_is_named(desk: ImageDesk):
    tokenizer = vision_tokenizer()
    own = "+ shown(message.content) + '\\n</tool_response>'"
    assert own in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(own, "~ message.content ~ '\\n</tool_response>'")
    reason = r"shows 0 of 1 images in messages of the roles tool; .* set model\.chat_template"
    with pytest.raises(RefusedError, match=reason):
        play(desk, looking({"a": [block(SQUARE)]}), [looks("a"), "Seen."], Chat(tokenizer))


def test_a_template_that_numbers_images_is_refused_where_an_image_stands_in_a_later_turn(desk: ImageDesk):
    tokenizer = vision_tokenizer()
    counted = tokenizer.chat_template.replace("{%- macro", "{%- set seen = namespace(value=0) %}\n{%- macro", 1)
    count, mark = "{%- set seen.value = seen.value + 1 %}{{- seen.value }}", "{{- '<|vision_start|>"
    tokenizer.chat_template = counted.replace(mark, count + mark)
    chat = Chat(tokenizer)
    first = [{"role": "user", "content": [block(SQUARE), {"type": "text", "text": "x"}]}]
    play(desk, looking({}), ["Seen."], chat, messages=first)
    with pytest.raises(RefusedError, match="add_vision_id"):
        play(desk, looking({"a": [block(SQUARE)]}), [looks("a"), "Seen."], chat, messages=first)


@pytest.mark.parametrize("same", [True, False])
def test_an_episode_ends_before_it_shows_more_images_than_a_trajectory_may_have(
    desk: ImageDesk, monkeypatch: pytest.MonkeyPatch, same: bool
):
    for module in (recorder, actor_images):
        monkeypatch.setattr(module, "MAX_IMAGES", 2)
    third = block(SQUARE) if same else block(encoded((4 * PATCH, 4 * PATCH), 3))
    toolbox = looking({"a": [block(SQUARE)], "b": [block(WIDE)], "c": [third]})
    trajectory, engine, _ = play(desk, toolbox, [looks("a"), looks("b"), looks("c"), "never"])
    assert trajectory.image_names == [digest_of(SQUARE), digest_of(WIDE)]
    assert trajectory.finish == "truncated"
    assert len(engine.requests) == 3
    many = [{"role": "user", "content": [block(SQUARE)] * 3}]
    with pytest.raises(RefusedError, match="3 images are shown at once"):
        play(desk, toolbox, ["never"], messages=many)


class Camera:
    def reset(self, scene: str, **row: Any) -> Any:
        self.scene = scene
        return ["\nIt begins: ", block(SQUARE)] if scene == "list" else Image.open(io.BytesIO(SQUARE))

    def view(self) -> Any:
        """Shows what is there."""
        return [block(WIDE), "wide"]

    async def listing(self) -> list[Any]:
        """Lists what is there."""
        return ["a", {"type": "image", "name": "no image of ours"}, 5]

    def get_reward(self) -> float:
        return 1.0


@pytest.mark.parametrize("scene", ["list", "picture"])
def test_environments_show_images_when_they_begin_and_as_results(desk: ImageDesk, scene: str):
    classes = environment_classes(ActorConfig(environment=f"{__name__}.Camera"))
    view = '<tool_call>\n{"name": "view", "arguments": {}}\n</tool_call>'
    script = [view, view.replace("view", "listing"), "Seen."]
    environments = Environments(classes, ToolLimits(GENEROUS_S, 0, 1000))
    trajectory, engine, sent = play(desk, environments, script, messages=[QUESTION], extra_info={"scene": scene})
    assert trajectory.rewards == {"Camera": 1.0}
    assert [len(given) for given in engine.images] == [1, 2, 2]
    assert len(sent) == 2
    text = CHAT.text(collapsed(trajectory.tokens, engine.images[-1]))
    begun = "\nIt begins: " if scene == "list" else ""
    assert f"What is it?{begun}<|vision_start|><|image_pad|><|vision_end|><|im_end|>" in text
    assert "<|vision_end|>wide\n</tool_response>" in text
    assert "['a', {'type': 'image', 'name': 'no image of ours'}, 5]" in text


class Painter(Interaction):
    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Response:
        ends = len(messages) > 2
        return ends, ["And this? ", block(WIDE)], 0.5, {}


def test_a_simulated_user_shows_images(desk: ImageDesk):
    users = Interactions({"painter": Painter({})}, InteractionLimits())
    info = {"interaction_kwargs": {"name": "painter"}}
    toolbox = Toolbox({}, ToolLimits(GENEROUS_S))
    trajectory, engine, _ = play(desk, toolbox, ["One.", "Two."], users=users, messages=[QUESTION], extra_info=info)
    assert shown(trajectory) == [(TOKENS[WIDE], digest_of(WIDE))]
    assert [len(given) for given in engine.images] == [0, 1]


def test_only_lists_of_texts_and_images_are_contents():
    image = {"type": "image", "image": "a.png"}
    text = {"type": "text", "text": "x"}
    assert read_content("x") == "x"
    assert read_content(["x", image]) == read_content((text, image)) == [text, image]
    assert read_content([text, text]) == "xx"
    for value in [None, 5, [], ["x"], [text, 5], [{"type": "image", "name": "x"}], {"type": "image", "image": "a"}]:
        assert read_content(value) is None


def test_texts_beside_images_are_cut_together():
    image = {"type": "image", "image": b"x"}
    assert cut_content("x" * 9, 9) == "x" * 9
    cut = cut_content([{"type": "text", "text": "abc"}, image, {"type": "text", "text": "d" * 50}], 8)
    assert cut == [
        {"type": "text", "text": "abc"},
        image,
        {"type": "text", "text": "ddd\n[45 characters cut]\ndd"},
    ]
    assert joined("a", "b") == "ab"
    assert joined("a", [image]) == [{"type": "text", "text": "a"}, image]
    assert joined([image], "b") == [image, {"type": "text", "text": "b"}]
