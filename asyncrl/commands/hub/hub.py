"""Uploads an exported model to the Hugging Face hub in one commit, so that readers never see an incomplete model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TypeVar

from asyncrl.commands.export import export_run
from asyncrl.errors import AsyncrlError, ConfigError, UnavailableError
from asyncrl.launch.preflight.hub import unreachable
from asyncrl.runs.card import CARD, PICTURE, named
from asyncrl.runs.finding import find_run, require_run
from asyncrl.runs.report.page import REPORT_FILE, write_report

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 10.0
TRIES = 3
PAUSE_S = 5.0
OF_A_MODEL = (
    *(
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        "*processor_config.json",
        "*.safetensors.index.json",
    ),
    *("*tokenizer*.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.json", "*.jinja"),
    *("model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.bin", "pytorch_model.bin.index.json"),
    *("configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py", "__init__.py"),
    *(CARD, PICTURE, "LICENSE*", "NOTICE*"),
)
"""Names of a model's files. Other files in the folder, such as keys, logs or optimizer states, are not uploaded."""
FOLDERS = (".", "additional_chat_templates")
RETRIED = (408, 429, 500, 502, 503, 504)
NO_TOKEN = (
    "there is no token for the hub: create one with write access at https://huggingface.co/settings/tokens, then run "
    "`hf auth login`, or set HF_TOKEN"
)


class HubError(AsyncrlError):
    """The hub refused a request. The message explains how to continue."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file to upload: its name in the repository, and its path on this machine. If `text` is given, it is uploaded
    instead of the file at `path`."""

    name: str
    path: Path
    text: str | None = None

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.path.stat().st_size if self.text is None else len(self.text.encode())


def model_folder(name: str, checkpoint: int | None) -> Path:
    """The folder of an exported model. `name` is the model's folder, or a run.

    A run's `checkpoint` is exported first if that has not been done. Raises ConfigError: there is no exported model.
    Raises CheckpointError: the checkpoint does not exist or cannot be read. Raises OSError.
    """
    folder = Path(name)
    if find_run(name) is None and (folder / "config.json").is_file():
        if checkpoint is not None:
            raise ConfigError(f"{folder} is the folder of a model, which has no checkpoints: leave out --checkpoint")
        return folder
    run = require_run(name).folder
    if checkpoint is not None:
        exported = run / "exports" / f"step-{checkpoint:06d}"
        return exported if (exported / "config.json").is_file() else export_run(str(run), checkpoint)
    if not (run / "model" / "config.json").is_file():
        raise ConfigError(
            f"{run} has no exported model: a run writes it at its end, unless learner.export=false. Choose a "
            "checkpoint by --checkpoint N"
        )
    return run / "model"


def files_of(folder: Path, repo: str, report: Path | None = None) -> list[HubFile]:
    """The files of a model folder to upload: only files in OF_A_MODEL.

    Other files are not uploaded. The log names them, except hidden files.

    `repo` is written into the model card, if asyncrl wrote the card. Raises ConfigError: a file is a link to the
    outside of the folder, where it may point to a key, for example.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    relative = {path.relative_to(folder).as_posix(): path for path in paths}
    files = [HubFile(name, path) for name, path in relative.items() if not name.startswith(".") and "/." not in name]
    for each in files:
        if not (target := each.path.resolve()).is_relative_to(folder.resolve()):
            raise ConfigError(f"{each.path} is a link to {target}, outside of the folder: copy the file, or remove it")
    if strays := [each.name for each in files if not _is_of_a_model(each.name)]:
        log.warning("not uploaded, since these are not files of a model: %s", ", ".join(map(ascii, strays)))
    files = [each for each in files if _is_of_a_model(each.name)]
    files = [_card(each, repo) if each.name == CARD else each for each in files]
    return files if report is None else [*files, HubFile(REPORT_FILE, report)]


def _is_of_a_model(name: str) -> bool:
    path = PurePosixPath(name)
    return str(path.parent) in FOLDERS and any(fnmatchcase(path.name, pattern) for pattern in OF_A_MODEL)


def report_of(name: str) -> Path:
    """Write the report of a run again, and return its path. Raises ConfigError: the run does not exist."""
    return write_report(name)


def push(
    files: Sequence[HubFile], repo: str, private: bool, message: str, wait: Callable[[float], object] = time.sleep
) -> str:
    """Create the repository if it does not exist, upload the files in one commit, and return the commit's address.

    Files that the repository already has are not uploaded again. Raises ConfigError: there is no token, or the name of
    the repository is invalid. Raises UnavailableError: the hub cannot be reached. Raises HubError: the hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    token = get_token()
    if token is None:
        raise ConfigError(NO_TOKEN)
    if reason := unreachable(PATIENCE_S):
        raise UnavailableError(f"the hub cannot be reached: {reason}; HF_ENDPOINT can name another hub")
    api = HfApi(token=token, library_name="asyncrl")

    def commit() -> str:
        # An operation remembers what it has uploaded, so each try needs new operations.
        operations = [
            CommitOperationAdd(each.name, str(each.path) if each.text is None else each.text.encode()) for each in files
        ]
        return str(api.create_commit(repo, operations, commit_message=message).commit_url)

    user = _asked(api.whoami, repo, wait)["name"]
    log.info("uploading %d files to %s as %s", len(files), repo, user)
    _asked(lambda: api.create_repo(repo, private=private or None, exist_ok=True), repo, wait)
    if private and not _asked(lambda: api.model_info(repo), repo, wait).private:
        raise HubError(f"{repo} exists and is public: make it private in its settings first, or leave out --private")
    return _asked(commit, repo, wait)


def _asked(request: Callable[[], T], repo: str, wait: Callable[[float], object]) -> T:
    """The hub's answer. A request that fails on the way is repeated, which is harmless for all requests of this module.

    Raises ConfigError, UnavailableError and HubError as `push` does.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    for left in reversed(range(TRIES)):
        try:
            return request()
        except OfflineModeIsEnabled as error:
            raise UnavailableError("HF_HUB_OFFLINE is set: unset it to upload") from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status not in RETRIED or not left:
                raise HubError(_refusal(status, repo, error)) from error
            reason = f"status {status}"
        except HFValidationError as error:
            raise ConfigError(f"{repo} is not a valid name of a repository: {error}") from error
        except ValueError as error:
            raise HubError(f"the hub does not accept this: {error}") from error
        except Exception as error:
            refused = error.__cause__
            if isinstance(refused, HfHubHTTPError) and refused.response.status_code not in RETRIED:
                raise HubError(_refusal(refused.response.status_code, repo, refused)) from error
            if not left:
                raise UnavailableError(f"the hub cannot be reached: {refused or error}") from error
            reason = str(refused or error)
        log.warning("a request to the hub failed (%s); trying again in %g s", reason, PAUSE_S)
        wait(PAUSE_S)
    raise AssertionError("unreachable: the last try returns or raises")


def _refusal(status: int, repo: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[-1]
    match status:
        case 401:
            return (
                "the hub does not accept the token (401), which may have expired. Create one with write access at "
                "https://huggingface.co/settings/tokens, then run `hf auth login`, or set HF_TOKEN"
            )
        case 403:
            return (
                f"the token may not write {repo} (403): the name must begin with your user or organisation, and the "
                f"token needs write access ({reason})"
            )
        case 404:
            return f"the hub has no {repo}, or the token may not read it (404)"
        case 413:
            return f"the hub says that a file is too large (413): {reason}"
    return f"the hub refused (status {status}): {reason}"


def _card(file: HubFile, repo: str) -> HubFile:
    return HubFile(file.name, file.path, named(file.path.read_text(errors="replace"), repo))
