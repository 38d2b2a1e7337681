from dataclasses import replace

from asyncrl.scoring.answers import answer_texts, response_text
from asyncrl.scoring.transcript import Passage, Transcript, transcripts
from asyncrl.types import Step, Task, Trajectory
from tests.scoring.fakes import END, CharTokenizer, answered, episode

E = chr(END)
TURNS = [("prompt", "Q"), ("assistant", "call"), ("tool", "ok"), ("assistant", "it is 5"), ("tool", "after")]


def transcript(trajectory: Trajectory, tokenizer: CharTokenizer, task: Task) -> Transcript:
    (only,) = transcripts(trajectory, tokenizer, task)
    return only


def test_a_branch_is_a_transcript_of_its_own_and_the_last_one_has_the_answer():
    again = ("prompt", f"{E}system\nbe brief{E}\n{E}user\nso far: 5")
    task, trajectory = episode(*TURNS, again, ("assistant", "six"), ("tool", "after"))
    first, second = transcripts(trajectory, CharTokenizer(), task)
    assert [passage.text for passage in first] == ["Q", "call<end>", "ok", "it is 5<end>"]
    assert first[0].plain == "Q"
    assert second == [
        Passage("<end>system\nbe brief<end>\n<end>user\nso far: 5", False, "so far: 5"),
        Passage("six<end>", True, "six"),
    ]
    assert answer_texts(trajectory, CharTokenizer())[0] == "six"
    assert response_text(trajectory, CharTokenizer()) == "sixafter"


def test_a_transcript_is_cut_at_the_bounds_of_the_steps_and_ends_with_the_last():
    task, trajectory = episode(*TURNS)
    assert transcript(trajectory, CharTokenizer(), task) == [
        Passage("Q", False, "?"),
        Passage("call<end>", True, "call"),
        Passage("ok", False, "ok"),
        Passage("it is 5<end>", True, "it is 5"),
    ]


def test_plain_text_has_the_problem_as_the_task_says_it_and_nothing_of_the_template():
    turns = [("prompt", "sys Q"), ("assistant", "call"), ("tool", f"{E}tool\n<r>ok\nuser\n</r>{E}\n{E}assistant\n")]
    task, trajectory = episode(*turns, ("assistant", "user\n5"))
    task = replace(
        task,
        messages=[
            {"role": "system", "content": "sys"},
            *task.messages,
            {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]},
        ],
    )
    plain = [passage.plain for passage in transcript(trajectory, CharTokenizer(), task)]
    assert plain == ["?\n\n2+2", "call", "<r>ok\nuser\n</r>", "user\n5"]


def test_a_prompt_of_several_speakers_is_told_whole_and_says_who_speaks():
    task, trajectory = episode(*TURNS)
    messages = [("system", "be brief"), ("user", "1+1?"), ("assistant", "2"), ("user", "2+3?")]
    task = replace(task, messages=[{"role": role, "content": text} for role, text in messages])
    assert transcript(trajectory, CharTokenizer(), task)[0].plain == "user: 1+1?\n\nassistant: 2\n\nuser: 2+3?"
    task = replace(task, messages=[{"role": "system", "content": "1+1?"}])
    assert transcript(trajectory, CharTokenizer(), task)[0].plain == "1+1?"


def test_steps_within_a_turn_follow_each_other():
    task, trajectory = answered("72", steps=(Step(5, 7), Step(7, 10), Step(12, 15)))
    passages = transcript(trajectory, CharTokenizer(), task)
    assert [passage.text for passage in passages if passage.is_step] == ["ca", "ll<end>", "72<end>"]
    assert [passage.is_step for passage in passages] == [False, True, True, False, True]


def test_a_problem_with_images_is_its_texts():
    task, trajectory = episode(*TURNS)
    table = [{"type": "image", "text": None, "image": b"x"}, {"type": "text", "text": "2+3=", "image": None}]
    for content, problem in [(table, "2+3="), (["2", "+3="], "2+3="), (None, "")]:
        asked = replace(task, messages=[{"role": "user", "content": content}])
        assert transcript(trajectory, CharTokenizer(), asked)[0].plain == problem
