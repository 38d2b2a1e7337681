"""A hub that cannot be reached is found out before its client tries for half a minute."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants

from asyncrl.config.schema import CriticConfig, ImplicitConfig, ModelConfig, ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import hub, models
from asyncrl.launch.preflight.hub import no_answer, unreachable
from asyncrl.launch.preflight.models import check_existence
from asyncrl.machine.ports import free_ports
from tests.helpers import GENEROUS_S


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_model_on_a_hub_where_nothing_answers_is_refused_without_the_retries_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_ports(1)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: pytest.fail("it is tried all the same"))
    with pytest.raises(ConfigError, match=rf"hub cannot be reached: nothing answers at 127\.0\.0\.1:{port} \(Connec"):
        check_existence(ModelConfig(path="nobody/nothing"), CriticConfig(), ImplicitConfig(), ScoringConfig())


def test_a_name_without_an_owner_is_refused_after_one_request_without_an_answer(
    listening: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{listening}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("it is tried all the same"))
    monkeypatch.setattr(models, "no_answer", partial(no_answer, patience_s=0.05))
    with pytest.raises(ConfigError, match=r"there is no folder nomodel here, and .* hub cannot be reached \(\w+"):
        check_existence(ModelConfig(path="nomodel"), CriticConfig(), ImplicitConfig(), ScoringConfig())


@pytest.mark.parametrize(("revision", "where"), [(None, ""), ("v2", " at revision v2")])
def test_a_model_that_is_not_in_the_cache_while_nobody_may_ask_the_hub_is_refused_with_the_reason(
    revision: str | None, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        check_existence(
            ModelConfig(path="nobody/nothing", revision=revision), CriticConfig(), ImplicitConfig(), ScoringConfig()
        )
    assert str(refused.value) == (
        f"model.path=nobody/nothing: there is no such folder, the model is not in this machine's cache{where}, and "
        "HF_HUB_OFFLINE=1 forbids asking the hub: download it first, or name a folder"
    )


@pytest.mark.parametrize("form", ["http://{}", "{}"])
def test_a_hub_behind_a_proxy_counts_as_reached_if_the_proxy_answers(
    form: str, listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": form.format(listening)})
    assert unreachable(GENEROUS_S) is None


def test_a_hub_that_answers_is_reached_and_one_that_nobody_may_ask_is_not_looked_for(
    listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://{listening}")
    assert unreachable(GENEROUS_S) is None
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert unreachable(GENEROUS_S) is None


def test_a_network_that_is_silent_for_a_while_is_told_of_and_tried_further(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setattr(hub, "connection_error", lambda *_: over.wait(GENEROUS_S) and None)
    assert unreachable(patience_s=0.01) is None
    over.set()
    assert "nothing has answered at hub.example:443 for 0.01 s; the start keeps trying" in caplog.text
