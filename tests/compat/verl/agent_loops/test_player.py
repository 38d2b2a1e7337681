"""Agent loops written for verl play exact episodes, and an output that does not agree with them is refused by name."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.agents.chat_api.result import AgentError
from asyncrl.chat.chat import Chat
from asyncrl.compat.verl.agent_loops.player import read_loops
from asyncrl.compat.verl.names import provide_verl
from asyncrl.config.schema import DataConfig
from asyncrl.engine.base import Generation
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.limits import LimitError
from asyncrl.errors import ConfigError, EngineError
from asyncrl.types import Finish, Role, Trajectory
from tests.compat.verl.agent_loops.support import CHAT, LIMITS, TASK, TOKENIZER, make_player, play, runner_of
from tests.episode.fakes import END, Cut, ScriptedEngine, make_ticket
from tests.vision import vision_desk, vision_tokenizer

LOOPS = f"{__package__}.loops"
UNUSUAL = f"{__package__}.unusual"
ANSWER = "it is 15"
PAGE = Path(__file__).parents[4] / "docs" / "verl.md"

pytestmark = pytest.mark.skipif(not provide_verl(), reason="verl itself is installed here")


def spans(trajectory: Trajectory, role: Role = Role.ASSISTANT) -> list[str]:
    return [CHAT.text(trajectory.tokens[turn.start : turn.end]) for turn in trajectory.turns if turn.role is role]


async def test_a_loop_that_continues_its_conversation_is_one_sequence_of_the_templates_own_tokens() -> None:
    trajectory = await play(f"{LOOPS}.Twice", [ANSWER, "yes"])
    conversation = [*TASK.messages, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "sure?"}]
    whole = TOKENIZER.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert CHAT.text(trajectory.tokens) == f"{whole}yes{END}"
    assert [turn.role for turn in trajectory.turns] == [Role.PROMPT, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert trajectory.finish is Finish.COMPLETED
    assert set(trajectory.timings) == {"wait", "generate", "agent"}


async def test_the_loop_of_the_page_plays_an_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = next(each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "AsksTwice" in each)
    (tmp_path / "my_loops.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    trajectory = await play(make_player("my_loops.AsksTwice"), [ANSWER, "yes"])
    assert spans(trajectory) == [ANSWER + END, "yes" + END]
    assert "Are you sure?" in spans(trajectory, Role.TOOL)[0]


async def test_loops_of_earlier_releases_play_the_same_sequence() -> None:
    player = make_player(f"{LOOPS}.Older")
    first, again = [await play(player, [ANSWER, "yes"]) for _ in range(2)]
    newer = await play(f"{LOOPS}.Twice", [ANSWER, "yes"])
    assert first.tokens.tolist() == again.tokens.tolist() == newer.tokens.tolist()
    from tests.compat.verl.agent_loops.loops import Older

    assert Older.ready == 1


async def test_the_score_the_turns_and_the_numbers_of_an_output_are_carried() -> None:
    player = make_player(f"{LOOPS}.Twice")
    trajectory = await play(player, [ANSWER, "yes"])
    assert trajectory.rewards == {"reward_score": 1.0}
    assert trajectory.turn_scores == [0.25, 1.0]
    assert player.counters() == {"agent/depth": 2.0, "agent/num_turns": 4.0}
    assert player.counters() == {}


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        ("Edits", r"token 42 at position 15 .* at position 15 the sequence departs from all"),
        ("ClaimsMore", r"token 42 at position 22 was not sampled by the policy"),
        ("ClaimsPrompt", r"at position 11 .*: it lies in tokens that the policy was given"),
        ("CutsPrompt", r"at position 9 .* at position 0 the sequence departs"),
        ("OtherLogprobs", r"log-prob of the token at position 13 is given as -0.25, but it was sampled with -0.5"),
        ("ShortMask", r"response_mask must be 0 or 1 for each of 9 response_ids"),
        ("MasksAll", r"the policy sampled no token"),
        ("Nothing", r"returned None, which has no prompt_ids"),
        ("Hotter", r"temperature=1.3: this episode is sampled at 1; set actor.temperature"),
        ("Narrow", r"top_p=0.9: turns are sampled without this setting"),
        ("Stops", r"stop=\['.n'\]: turns are sampled without this setting"),
        ("StopsAtTokens", r"these tokens end no turn; set actor.end_tokens=\['\?'\]"),
        ("Breaks", r"failed: KeyError: 'board'"),
        ("Exits", r"failed: .*SystemExit: 3"),
    ],
)
async def test_a_loop_that_errs_fails_its_episode_by_name(loop: str, reason: str) -> None:
    with pytest.raises(AgentError, match=f"(?s)the agent loop {UNUSUAL}.{loop}.*{reason}"):
        await play(f"{UNUSUAL}.{loop}", [ANSWER])


async def test_a_cut_response_is_cut_and_counted_as_truncated() -> None:
    trajectory = await play(f"{UNUSUAL}.CutsResponse", [ANSWER], exact=False)
    whole = await play(f"{UNUSUAL}.Once", [ANSWER])
    assert trajectory.tokens.tolist() == whole.tokens[: whole.turns[1].start + 5].tolist()
    assert trajectory.sampled_tokens == 5
    assert trajectory.finish is Finish.TRUNCATED
    assert trajectory.logprobs.tolist() == whole.logprobs[: len(trajectory)].tolist()


async def test_the_single_turn_is_cut_at_the_length_of_a_response() -> None:
    player = make_player("single_turn_agent", max_tokens=43, max_turn_tokens=30)
    trajectory = await play(player, ["x" * 60], exact=False)
    assert trajectory.sampled_tokens == 30
    assert trajectory.finish is Finish.TRUNCATED


@pytest.mark.parametrize(("truncation", "kept"), [("left", slice(-10, None)), ("right", slice(10))])
async def test_a_long_prompt_is_cut_as_the_data_says_or_refused(truncation: str, kept: slice) -> None:
    whole = CHAT.prompt(TASK.messages, ())
    player = make_player("single_turn_agent", data=DataConfig(max_prompt_length=10, truncation=truncation))
    trajectory = await play(player, [ANSWER])
    assert trajectory.tokens[:10].tolist() == whole[kept].tolist()
    assert trajectory.turns[0].end == 10
    refuses = make_player("single_turn_agent", data=DataConfig(max_prompt_length=10))
    with pytest.raises(AgentError, match=r"the prompt has 13 tokens; data.max_prompt_length is 10"):
        await play(refuses, [ANSWER])


async def test_sampled_tokens_that_the_mask_leaves_out_are_context() -> None:
    trajectory = await play(f"{UNUSUAL}.MasksFirst", [ANSWER], exact=False)
    whole = await play(f"{UNUSUAL}.Once", [ANSWER])
    start = whole.turns[1].start
    assert trajectory.tokens.tolist() == whole.tokens.tolist()
    assert np.flatnonzero(trajectory.loss_mask).tolist() == list(range(start + 4, len(whole)))
    assert trajectory.logprobs[start + 4 :].tolist() == whole.logprobs[start + 4 :].tolist()
    assert [turn.role for turn in trajectory.turns] == [Role.PROMPT, Role.TOOL, Role.ASSISTANT]
    assert trajectory.finish is Finish.COMPLETED


@pytest.mark.parametrize(
    ("loop", "script", "returned"),
    [("Summarises", [ANSWER, "done"], "done"), ("BestOf", ["wrong", ANSWER, "no"], ANSWER)],
)
async def test_turns_that_a_loop_does_not_return_are_not_trained_but_counted(
    loop: str, script: list[str], returned: str
) -> None:
    player = make_player(f"{UNUSUAL}.{loop}")
    trajectory = await play(player, script, exact=False)
    assert spans(trajectory) == [returned + END]
    assert len(trajectory.branches) == 1
    assert trajectory.finish is Finish.COMPLETED
    assert player.counters()["agent/unreturned_turns"] == len(script) - 1


async def test_numbers_that_cannot_be_metrics_are_left_out_and_counted() -> None:
    player = make_player(f"{UNUSUAL}.ManyNumbers")
    assert (await play(player, [ANSWER])).rewards == {"reward_score": 1.0}
    counters = player.counters()
    assert counters["agent/numbers_left_out"] == 12
    assert counters["agent/num_turns"] == 2
    assert len(counters) <= 32
    assert all(math.isfinite(each) for each in counters.values())


async def test_a_row_gives_its_columns_to_the_loop() -> None:
    task = replace(
        TASK,
        extra_info={"index": 7, "self": 1, "params": 2, "sampling_params": 3, "board": "old"},
        columns={"agent_name": "shows_row", "board": "xo", "ability": "math", "reward_model": {"style": "model"}},
    )
    make_player(f"{UNUSUAL}.ShowsRow")
    await play(make_player("single_turn_agent"), [ANSWER], task=task)
    from tests.compat.verl.agent_loops.unusual import ShowsRow

    shown = ShowsRow.row
    assert (shown["board"], shown["ability"], shown["reward_model"]) == ("xo", "math", {"style": "model"})
    assert (shown["index"], shown["raw_prompt"]) == (7, TASK.messages)
    assert not {"self", "params", "sampling_params", "agent_name"} & {*shown}


def test_a_loop_whose_run_is_not_async_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"PlainRun has a plain `def run` \(.*unusual\.py, line \d+\): write `async def"
    ):
        make_player(f"{UNUSUAL}.PlainRun")


async def test_a_turn_that_was_cut_may_go_on_without_a_token_between() -> None:
    limits = replace(LIMITS, max_turns=3)
    trajectory = await play(f"{UNUSUAL}.StopsWhenFull", [Cut("it"), Cut(" is"), " 15"], limits=limits)
    assert spans(trajectory) == ["it", " is", " 15" + END]
    assert len(trajectory.branches) == 1
    assert trajectory.finish is Finish.TRUNCATED


async def test_a_loop_that_ends_because_the_episode_is_full_leaves_a_truncated_trajectory() -> None:
    limits = replace(LIMITS, max_turns=2)
    trajectory = await play(f"{UNUSUAL}.AsksOn", [Cut("it"), Cut(" is")], limits=limits)
    assert spans(trajectory) == ["it", " is"]
    assert trajectory.finish is Finish.TRUNCATED
    assert trajectory.rewards == {}
    with pytest.raises(LimitError, match="max_tokens=5"):
        await play(f"{UNUSUAL}.AsksOn", [], limits=replace(LIMITS, max_tokens=5))


async def test_a_turn_has_at_most_the_tokens_that_the_loop_wants() -> None:
    trajectory = await play(f"{UNUSUAL}.Short", [ANSWER])
    assert trajectory.sampled_tokens == 3


async def test_a_failure_of_the_engine_ends_the_episode_even_if_the_loop_ignores_it() -> None:
    async def fails(session: str) -> str:
        raise EngineError("no server")

    with pytest.raises(EngineError, match="no server"):
        await play(f"{UNUSUAL}.IgnoresFault", [ANSWER, fails])
    aborted = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
    with pytest.raises(EngineError, match="aborted"):
        await play(f"{UNUSUAL}.Once", [aborted])


async def test_a_cancelled_episode_ends_its_loop() -> None:
    player = make_player(f"{UNUSUAL}.Waits")
    from tests.compat.verl.agent_loops.unusual import Waits

    Waits.began, Waits.ended = asyncio.Event(), asyncio.Event()
    runner = runner_of(player, [ANSWER])
    running = asyncio.create_task(runner.run(replace(make_ticket("t/1"), task=TASK), lambda: None))
    await asyncio.wait_for(Waits.began.wait(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert Waits.ended.is_set()


async def test_a_row_names_its_loop_but_only_a_registered_one() -> None:
    player = make_player("single_turn_agent")
    make_player(f"{LOOPS}.Twice")
    named = replace(TASK, extra_info={**TASK.extra_info, "agent_name": "twice"})
    assert len(spans(await play(player, [ANSWER, "yes"], task=named))) == 2
    assert len(spans(await play(player, [ANSWER]))) == 1
    for name, hint in (("twcie", "did you mean twice"), (f"{LOOPS}.Twice", "there are"), ("os.system", "there are")):
        unknown = replace(TASK, extra_info={"agent_name": name})
        with pytest.raises(AgentError, match=f"agent_name .* is not registered; {hint}"):
            await play(player, [], task=unknown)


async def test_a_file_gives_loops_their_arguments(tmp_path: Path) -> None:
    path = tmp_path / "loops.yaml"
    path.write_text(f"- name: asks\n  _target_: {LOOPS}.Twice\n  question: really?\n")
    trajectory = await play(make_player("asks", given=read_loops(str(path))), [ANSWER, "yes"])
    assert "really?" in spans(trajectory, Role.TOOL)[0]


async def test_a_file_is_read_as_hydra_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loops.yaml"
    nested = "  inner:\n    _target_: fractions.Fraction\n    numerator: ${..cfg.depth}\n"
    path.write_text(
        f"- name: a\n  _target_: {UNUSUAL}.Nested\n  cfg: {{depth: 2}}\n  home: ${{oc.env:PLACE}}\n{nested}"
    )
    monkeypatch.setenv("PLACE", "here")
    await play(make_player("a", given=read_loops(str(path))), [ANSWER])
    from tests.compat.verl.agent_loops.unusual import Nested

    assert Nested.made == ["here", 2, 2]
    monkeypatch.delenv("PLACE")
    with pytest.raises(ConfigError, match=r"loops\.yaml cannot be read: .*PLACE"):
        read_loops(str(path))


def test_a_loop_of_a_file_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        make_player("single_turn_agent", given={"b": {"_target_": "nowhere.Loop"}})


@pytest.mark.parametrize("text", ["name: a", "- name: a", "- 3", "[", ""])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "loops.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"agent_loop_config_path=.*loops\.yaml"):
        read_loops(str(path))


@pytest.mark.parametrize("name", ["thrice", "nowhere.Loop", f"{LOOPS}.Thrice"])
def test_a_default_loop_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"default_agent_loop={name}"):
        make_player(name)


@pytest.mark.parametrize(
    ("further", "reason"),
    [
        ({"actor_rollout_ref": {"rollout": {"response_length": 7}}}, "response_length is actor.max_tokens here"),
        ({"actor_rollout_ref": {"rollout": {"multi_turn": {"max_assistant_turns": 7}}}}, "is actor.max_turns here"),
        ({"actor_rollout_ref": 3}, "cannot be read"),
    ],
)
def test_keys_that_asyncrl_has_itself_are_refused(further: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_player("single_turn_agent", config=further)


async def test_images_are_refused_by_name() -> None:
    shown = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}, {"type": "text", "text": "?"}]
    for content in (shown, [{"type": "image", "image": "a.png"}]):
        task = replace(TASK, messages=[{"role": "user", "content": content}])
        with pytest.raises(AgentError, match=r"only text here|image cannot be recorded"):
            await play("single_turn_agent", [], task=task)
    with pytest.raises(AgentError, match="image_data: agent loops of verl show only text"):
        await play(f"{UNUSUAL}.ShowsImages", [])


async def test_tokens_with_the_placeholder_of_an_image_are_refused(tmp_path: Path) -> None:
    tokenizer = vision_tokenizer()
    player = make_player(f"{UNUSUAL}.Forges")
    runner = EpisodeRunner(ScriptedEngine(tokenizer, [ANSWER]), Chat(tokenizer), player, LIMITS)
    runner = replace(runner, images=vision_desk(tmp_path))
    with pytest.raises(AgentError, match="tokens cannot show an image or a video"):
        await runner.run(replace(make_ticket("t/1"), task=TASK), lambda: None)
