"""The ladder's policy and tasks, made in a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.commands.demo.ladder.prepare import HELD_OUT_TASKS, TRAINING_TASKS, prepare_rung
from asyncrl.commands.demo.ladder.tasks import RUNGS, call
from asyncrl.commands.demo.ladder.transcripts import TWO_TOOLS, ladder_tokenizer
from asyncrl.data.reading import TaskFile

pytestmark = pytest.mark.slow


@pytest.mark.heavy
def test_all_rungs_of_a_seed_share_a_policy_and_have_tasks_of_their_own(tmp_path: Path) -> None:
    lines: list[str] = []
    one, other = (prepare_rung(tmp_path, RUNGS[name], 0, lines.append, 2) for name in ("brackets-2", "undo"))
    assert one.model == other.model
    assert one.train != other.train
    assert AutoModelForCausalLM.from_pretrained(one.model).config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(one.model).chat_template
    train, held_out = TaskFile(one.train), TaskFile(one.held_out)
    assert (len(train), len(held_out)) == (TRAINING_TASKS, HELD_OUT_TASKS)
    assert not {task.messages[1]["content"] for task in train} & {task.messages[1]["content"] for task in held_out}
    said = len(lines)
    assert prepare_rung(tmp_path, RUNGS["brackets-2"], 0, lines.append, 2) == one
    assert len(lines) == said, "what is there is not made again"
    assert prepare_rung(tmp_path, RUNGS["brackets-2"], 1, lines.append, 2).model != one.model


def test_a_call_is_a_few_tokens() -> None:
    tokenizer = ladder_tokenizer()
    turns = [call("calculator", {"operator": "*"}), call("undo", {})]
    before = [{"role": "user", "content": "2*3"}]
    lengths = [
        len(tokenizer.apply_chat_template([*before, *more], tools=TWO_TOOLS, return_dict=False))
        for more in ([], turns[:1], turns[1:])
    ]
    assert [length - lengths[0] for length in lengths[1:]] == [7, 5]
