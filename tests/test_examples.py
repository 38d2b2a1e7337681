"""The examples fit together: demonstrations, chat template, tools and rule are those with which the policy plays."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.chat.chat_checks import as_tool
from asyncrl.config.compose import composed
from asyncrl.data.command import convert, convert_demonstrations
from asyncrl.data.converters.calculator_calls import Calculation, LeftOut, demonstration
from asyncrl.data.demonstrations import Demonstration, DemonstrationFile
from asyncrl.data.reading import TaskFile
from asyncrl.episode.demonstrations import demonstration_tokens
from asyncrl.tools.calculator import Calculator
from tests.episode.fakes import END, ScriptedEngine, make_ticket, make_tokenizer, play_with_tools
from tests.scoring.fakes import rules_of

ROOT = Path(__file__).parents[1]
EXAMPLES = ("gsm8k", "reasoning_gym")
TEMPLATE = ROOT / "examples" / "gsm8k" / "chat.jinja"
EXCERPT = ROOT / "tests" / "data" / "gsm8k"


def assert_plays_as_shown(messages: Sequence[Mapping[str, Any]]) -> str:
    """Play the task of a demonstration with a policy that says what the demonstration says. Returns the answer."""
    tokenizer = make_tokenizer(TEMPLATE.read_text())
    chat = Chat(tokenizer, {})
    tokens, mask = demonstration_tokens(chat, Demonstration(messages), {"calculator": Calculator.schema})
    said = chat.text(tokens[mask]).split(END)[:-1]
    prompt = list(takewhile(lambda message: message["role"] != "assistant", messages))
    engine = ScriptedEngine(tokenizer, said)
    played = asyncio.run(play_with_tools(engine, chat, {"calculator": Calculator}, make_ticket(messages=prompt)))
    assert np.array_equal(played.tokens, tokens)
    assert np.array_equal(played.loss_mask, mask)
    return said[-1]


def test_demonstrations_of_gsm8k_have_the_tokens_of_episodes_of_its_tasks(tmp_path: Path) -> None:
    convert("gsm8k", str(EXCERPT), tmp_path / "gsm8k.parquet")
    convert_demonstrations("gsm8k", str(EXCERPT), tmp_path / "shown.parquet")
    tasks = {task.messages[1]["content"]: task for task in TaskFile(tmp_path / "gsm8k.parquet")}
    for shown in DemonstrationFile([tmp_path / "shown.parquet"])[:3]:
        task = tasks[shown.messages[1]["content"]]
        assert shown.messages[:2] == task.messages
        assert rules_of("gsm8k")(assert_plays_as_shown(shown.messages), task.ground_truth).outcome == 1.0


def test_demonstrations_of_a_task_without_a_system_message_have_the_tokens_of_its_episodes() -> None:
    task = {"role": "user", "content": "Calculate 2 * ( 3 + -4 )."}
    shown = demonstration([task], [Calculation("", "2 * ( 3 + -4 )", "-2")], "<answer>-2</answer>")
    assert not isinstance(shown, LeftOut)
    assert assert_plays_as_shown(shown) == "<answer>-2</answer>"


def test_the_template_shows_several_results_and_a_conversation_without_tools() -> None:
    chat = Chat(make_tokenizer(TEMPLATE.read_text()), {})
    user = {"role": "user", "content": "2 and 3?"}
    assert chat.text(chat.prompt([user], [])) == f"<|im_start|>user\n2 and 3?{END}\n<|im_start|>assistant\n"
    results = [{"role": "tool", "content": content, "name": "calculator"} for content in "23"]
    end = int(chat.stop_ids[0])
    assert chat.text(chat.suffix(results, [as_tool(Calculator.schema)], end)) == (
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
        f"{END}\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_rl_begins_with_the_model_of_the_fine_tuning_and_has_its_tools_and_lengths(name: str) -> None:
    sft, rl = (composed([f"experiment={ROOT / 'examples' / name / file}"]) for file in ("sft.yaml", "rl.yaml"))
    assert rl.model.path == f"{sft.run.dir}/{sft.run.name}/model"
    assert (ROOT / "examples" / name / str(sft.model.chat_template)).resolve() == TEMPLATE
    assert rl.actor.tools == sft.actor.tools == [Calculator.schema["name"]]
    assert rl.actor.max_tokens == sft.actor.max_tokens
    assert rl.data.system_prompt is None  # Demonstrations have the prompts of the tasks as they are.
    assert rl.learner.eval_every
