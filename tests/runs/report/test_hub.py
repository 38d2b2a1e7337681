"""Uploads to a hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from asyncrl.commands.hub.hub import HubError, files_of, model_folder, push
from asyncrl.commands.hub.push_to_hub import main
from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.machine.ports import free_ports
from asyncrl.runs.card import CARD, PICTURE, card, trained_model
from asyncrl.runs.run import Run
from tests.runs.report.fake_hub import FakeHub, serving
from tests.runs.support import write_run

REPO = "someone/calculator"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving() as hub:
        use(hub.url, monkeypatch)
        yield hub


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "run", [0.1, 0.9])
    model = run / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (model / ".hidden").write_text("")
    (model / PICTURE).write_bytes(b"a picture")
    (model / CARD).write_text(card(trained_model(Run(run))))
    return run


def pushed(run: Path, private: bool = False) -> tuple[str, list[float]]:
    waits: list[float] = []
    return push(files_of(run / "model", REPO), REPO, private, "Upload", waits.append), waits


def test_a_link_to_a_file_outside_of_the_folder_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    (run / "model" / "notes.txt").symlink_to(tmp_path / "key")
    with pytest.raises(ConfigError, match="outside of the folder"):
        files_of(run / "model", REPO)


def test_files_that_are_not_of_a_model_are_left_out_and_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    strays = [
        "optimizer.pt",
        "optimizer.safetensors",
        "key.pem",
        "train.log",
        "secrets.json",
        "state/model.safetensors",
    ]
    (run / "model" / "state").mkdir()
    for name in strays:
        (run / "model" / name).write_text("secret")
    (run / "model" / "tokenizer_config.json").write_text("{}")
    names = {each.name for each in files_of(run / "model", REPO)}
    assert names == {"config.json", "tokenizer_config.json", "model.safetensors", PICTURE, CARD}
    assert all(repr(name) in caplog.text for name in strays)


def test_the_model_and_its_card_are_one_commit(hub: FakeHub, run: Path) -> None:
    url, _ = pushed(run)
    assert url.startswith(f"{hub.url}/{REPO}/commit/")
    assert hub.files.keys() == {"config.json", "model.safetensors", "curves.png", CARD}
    assert hub.files["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()
    assert f'path = "{REPO}"'.encode() in hub.files[CARD]
    assert hub.requests["commit"] == 1
    assert hub.repos == {REPO: False}


@pytest.mark.slow
def test_what_is_there_already_is_not_uploaded_again(hub: FakeHub, run: Path) -> None:
    pushed(run)
    before = hub.requests["lfs"]
    pushed(run)
    assert hub.requests["lfs"] == before
    assert hub.requests["commit"] == 1


@pytest.mark.slow
def test_a_private_repository_is_private_and_a_public_one_is_no_place_for_a_private_model(
    hub: FakeHub, run: Path
) -> None:
    pushed(run, private=True)
    assert hub.repos == {REPO: True}
    hub.repos[REPO] = False
    with pytest.raises(HubError, match="exists and is public"):
        pushed(run, private=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["create", "commit"])
def test_a_request_that_fails_on_the_way_is_made_again(hub: FakeHub, run: Path, kind: str) -> None:
    hub.answers[kind] = [503, 500]
    _, waits = pushed(run)
    assert len(waits) == 2
    assert CARD in hub.files


@pytest.mark.slow
def test_a_connection_that_ends_on_the_way_is_made_again(hub: FakeHub, run: Path) -> None:
    hub.cut = 1
    _, waits = pushed(run)
    assert len(waits) == 1
    assert CARD in hub.files


def test_a_hub_that_goes_on_failing_is_given_up(hub: FakeHub, run: Path) -> None:
    hub.refused["create"] = 503
    with pytest.raises(HubError, match="status 503"):
        pushed(run)


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("whoami-v2", 401, "does not accept the token"),
        ("create", 403, "may not write someone/calculator"),
        ("commit", 403, "may not write someone/calculator"),
        ("lfs", 403, "may not write someone/calculator"),
    ],
)
def test_a_refusal_says_what_to_do(hub: FakeHub, run: Path, kind: str, status: int, message: str) -> None:
    hub.refused[kind] = status
    with pytest.raises(HubError, match=message):
        pushed(run)
    assert hub.files == {}


def test_without_a_network_it_fails_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(f"http://127.0.0.1:{free_ports(1)}", monkeypatch)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        pushed(run)


def test_without_a_token_it_says_how_to_get_one(
    hub: FakeHub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="settings/tokens"):
        pushed(run)
    assert not hub.requests


def test_a_name_that_is_none_is_refused(hub: FakeHub, run: Path) -> None:
    with pytest.raises(ConfigError, match="is not a valid name of a repository"):
        push(files_of(run / "model", "a/b/c"), "a/b/c", False, "Upload")


@pytest.mark.slow
def test_a_dry_run_lists_files_and_asks_nobody(hub: FakeHub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run), REPO, "--dry-run", "--report"])
    printed = capsys.readouterr().out
    for text in (
        "16.4kB  model.safetensors",
        "report.html",
        f"in 5 files of {run / 'model'} would be uploaded to {REPO}",
    ):
        assert text in printed
    assert not hub.requests


def test_only_an_exported_model_can_be_uploaded(run: Path, tmp_path: Path) -> None:
    assert model_folder(str(run / "model"), None) == run / "model"
    with pytest.raises(ConfigError, match="leave out --checkpoint"):
        model_folder(str(run / "model"), 3)
    (run / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match="has no exported model"):
        model_folder(str(run), None)
    with pytest.raises(ConfigError, match="is not a run"):
        model_folder(str(tmp_path), None)
