import subprocess
import sys

import pytest

from asyncrl.config.schema import OutcomeModelConfig, ScoringModelConfig
from asyncrl.errors import ConfigError
from asyncrl.scoring.models import registry
from asyncrl.scoring.models.checkpoint import Checkpoint


def check(prm):
    registry.check_models(prm, OutcomeModelConfig())


class MyModel:
    """A user's model."""

    def __init__(self, config):
        self.name = f"mine@{config.params['version']}"

    def score(self, transcripts):
        return []


def test_a_class_of_the_users_is_called_with_its_section():
    config = ScoringModelConfig(family=f"{__name__}.MyModel", params={"version": 3})
    check(config)
    assert registry.load_prm(config).name == "mine@3"


@pytest.mark.parametrize("family", registry.PRM_FAMILIES)
def test_every_family_takes_its_defaults_and_refuses_unknown_parameters(family):
    needed = {"reference": "x"} if family == "prime" else {}
    check(ScoringModelConfig(family=family, path="x", params=needed))
    with pytest.raises(ConfigError, match=r"scoring\.prm\.params\.nonsense: this family has no such parameter"):
        check(ScoringModelConfig(family=family, params={"nonsense": 1}))


@pytest.mark.parametrize("family", registry.OUTCOME_FAMILIES)
def test_outcome_families_are_found(family):
    registry.check_models(ScoringModelConfig(), OutcomeModelConfig(family=family, path="x"))


@pytest.mark.parametrize(
    ("family", "params", "fix"),
    [
        ("qwen", {}, "use one of value_head, qwen_prm"),
        ("nowhere.Model", {}, "cannot be imported"),
        ("json.dumps", {}, "is not a reward model"),
        ("prime", {"beta": "much"}, "beta='much': it must be a number"),
        ("remote", {"retries": True}, "retries=True"),
        ("remote", {"retries": 1.5}, "retries=1.5"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(family, params, fix):
    with pytest.raises(ConfigError, match=fix):
        check(ScoringModelConfig(family=family, params=params))


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for family in ("qwen_prm", "rlhflow"):
        with pytest.raises(ConfigError, match=r"scoring\.prm\.path=.*cannot be loaded"):
            registry.load_prm(ScoringModelConfig(family=family, path=str(tmp_path)))
    with pytest.raises(ConfigError, match="path must be set"):
        registry.load_prm(ScoringModelConfig())


@pytest.mark.slow
def test_naming_families_needs_no_torch():
    code = "import sys; import asyncrl.scoring.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_of_the_hub_has_the_commit_in_its_name(tmp_path, monkeypatch):
    snapshot = tmp_path / "0123456789abcdef"
    snapshot.mkdir()
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda path, **_: asked.append(path) or str(snapshot))
    checkpoint = Checkpoint(ScoringModelConfig(path="someone/some-prm"), "scoring.prm")
    assert (checkpoint.name, checkpoint.folder, asked) == ("some-prm@01234567", snapshot, ["someone/some-prm"])
