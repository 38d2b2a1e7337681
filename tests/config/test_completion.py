"""Completion offers commands, keys and values, from the schema and the files of groups."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.completion import SCRIPTS, candidates

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["le"], ["learner "]),
        (["--v"], ["--version "]),
        (["completion", ""], ["bash ", "zsh "]),
        (["inspect", "st"], ["status ", "step "]),
        (["train", "lea"], ["learner."]),
        (["train", "alg"], ["algorithm=", "algorithm."]),
        (["train", "x=1", "learner.max"], ["learner.max_grad_norm="]),
        (["train", "+scoring.shaping.clip"], ["scoring.shaping.clip_eta="]),
        (
            ["train", "algorithm=d"],
            ["algorithm=dapo ", "algorithm=decoupled_ppo ", "algorithm=dppo ", "algorithm=dr_grpo "],
        ),
        (["train", "replay.sampler.kind=f"], ["replay.sampler.kind=fifo ", "replay.sampler.kind=freshest "]),
        (["train", "engine.launch=t"], ["engine.launch=true "]),
        (["train", "data.train="], []),
        (["keys", "lear"], []),
        (["nothing", ""], []),
    ],
)
def test_a_word_is_completed(words: list[str], found: list[str]) -> None:
    assert list(candidates(words)) == found


@pytest.fixture
def on_path(tmp_path: Path) -> dict[str, str]:
    """An environment in which `asyncrl` is this checkout's."""
    command = tmp_path / "asyncrl"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m asyncrl "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("asyncrl train ", "learner."),
        ("asyncrl train engine.kind=v", "vllm "),
        ("asyncrl sco", "scoring "),
    ],
)
def test_bash_completes_what_stands_behind_the_equals_sign(on_path: dict[str, str], line: str, replies: str) -> None:
    script = f"""{SCRIPTS["bash"]}
COMP_LINE="{line}"; COMP_POINT={len(line)}; _asyncrl; printf '%s\\n' "${{COMPREPLY[@]}}" """
    found = subprocess.run(["bash", "-c", script], env=on_path, capture_output=True, text=True, check=True)
    assert replies in found.stdout.split("\n")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_zsh_takes_the_script(on_path: dict[str, str]) -> None:
    script = f"""autoload -U compinit; compinit -D; {SCRIPTS["zsh"]}
compadd() {{ print -l -- "$@"; }}; words=(asyncrl train engine.kind=v); CURRENT=3; _asyncrl"""
    found = subprocess.run(["zsh", "-fc", script], env=on_path, capture_output=True, text=True, check=True)
    assert "engine.kind=vllm " in found.stdout.split("\n")
