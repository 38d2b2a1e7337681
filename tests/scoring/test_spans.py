"""The path of a step's score from a conversation to a token. After the actor's split, the scorer, the labels and the
learner's placement, each score is on the last token of its own step, and nowhere else."""

import re
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.chat.chat import Chat
from asyncrl.config.schema import ScoringConfig, ShapingConfig
from asyncrl.episode.steps import split_steps
from asyncrl.learner.batch.local_batch import build_episodes, build_local_batch
from asyncrl.scoring.scorer import Scorer
from asyncrl.scoring.shaping import earned, step_texts
from asyncrl.types import BatchPlan, Role, Turn
from tests.algorithms.support import make_rollouts
from tests.episode.fakes import END, ids, make_tokenizer
from tests.helpers import make_task, make_trajectory
from tests.scoring.fakes import InProcess, TextPRM, lease

TOKENIZER = make_tokenizer()
CHAT = Chat(TOKENIZER)


def sentences(pieces):
    """A user's split: a step begins after a Western or Chinese full stop."""
    return [index for index in range(1, len(pieces)) if re.search(r"[.。]\s*$", pieces[index - 1])]


def score_of(text):
    """A score by which a step's text is known again."""
    return np.float32(zlib.crc32(text.encode()) % 9973 / 10000 + 1e-3)


WRITTEN = st.text(st.sampled_from("ab. \n\t解é。👩‍👧{}"), max_size=25)
SPLITS = st.sampled_from(["turn", "paragraph", "line", sentences])


def conversation(prompt, turns, cut, split):
    """The trajectory of a conversation in which a tool answers every turn but the last."""
    spans, pieces, position = [], [], 0

    def append(text, role, finish=""):
        nonlocal position
        pieces.append(ids(TOKENIZER, text))
        spans.append(Turn(position, position + len(pieces[-1]), role, finish))
        position = spans[-1].end

    append("x" + prompt, Role.PROMPT)
    for index, (written, result) in enumerate(turns):
        last = index == len(turns) - 1
        ended = not (last and cut and written)
        append(written + END * ended, Role.ASSISTANT, "stop" if ended else "length")
        if not last:
            append(f"<|im_start|>user\n<tool_response>\n{result}\n</tool_response>{END}\n", Role.TOOL)
    tokens = np.concatenate(pieces)
    mask = np.zeros(len(tokens), np.bool_)
    for span in spans:
        mask[span.start : span.end] = span.role is Role.ASSISTANT
    return make_trajectory(
        length=len(tokens),
        tokens=tokens,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=tuple(spans),
        steps=split_steps(split, tokens, spans, CHAT.piece),
    )


def placed(trajectory, labels):
    """The step scores as the learner has them: one number a token of the trajectory."""
    plan = BatchPlan(0, 0, [labels.trajectory_id], ["g"], [len(trajectory)], [trajectory.sampled_tokens], [1.0])
    share = build_local_batch([0], [trajectory], torch.device("cpu"))
    episodes = build_episodes(plan, [labels], torch.device("cpu"))
    on_policy_tokens = make_rollouts(episodes, share.tokens).at_steps(episodes.step_scores)
    return PolicyTokens.of(share.tokens).scatter(on_policy_tokens).numpy()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(WRITTEN, st.lists(st.tuples(WRITTEN, WRITTEN), min_size=1, max_size=4), st.booleans(), SPLITS, st.booleans())
def test_each_score_lands_on_its_own_steps_tokens_and_nowhere_else(prompt, turns, cut, split, guarded):
    trajectory = conversation(prompt, turns, cut, split)
    shaping = ShapingConfig(enable_anti_hack=guarded, answer_pattern="解")
    config = ScoringConfig(rule="exact_match", shaping=shaping)
    scorer = Scorer(config, TOKENIZER, InProcess(config), TextPRM(score_of))
    (scored,) = scorer.score([lease((make_task(), trajectory), "rules", "prm")])
    on_tokens, steps = placed(trajectory, scored.labels), trajectory.steps
    assert [step.start for step in steps] == sorted({step.start for step in steps}), "steps follow each other"
    covered = np.zeros(len(trajectory), np.bool_)
    expected = np.zeros(len(trajectory), np.float32)
    texts = [
        TOKENIZER.decode(trajectory.tokens[step.start : step.end].tolist(), skip_special_tokens=True) for step in steps
    ]
    scores = np.array([score_of(text) for text in texts], np.float32)
    _, counted = earned(scores, step_texts(trajectory, texts), trajectory.sampled_tokens, shaping)
    assert guarded or len(counted) == len(steps)
    for index, step in enumerate(steps):
        covered[step.start : step.end] = True
        if index in counted:
            expected[step.end - 1] = scores[index]
    assert (covered == trajectory.loss_mask).all(), "steps are what the policy wrote, all of it"
    np.testing.assert_array_equal(on_tokens, expected)
