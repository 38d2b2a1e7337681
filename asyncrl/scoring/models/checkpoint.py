"""Reads a model's folder, local or from the Hugging Face hub: its name, tokenizer, weights and single tensors."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.schema import ScoringModelConfig
from asyncrl.errors import ConfigError
from asyncrl.machine.long_work import unmeasured_work
from asyncrl.modelling.devices import described
from asyncrl.scoring.models.encoding import Encode, Encoder
from asyncrl.scoring.transcript import Passage

logger = logging.getLogger(__name__)

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "pytorch_model*.bin"]
_SAMPLE = 1 << 20
PROBE = (Passage("1", False), Passage("1", True), Passage("1", False), Passage("1", True))
"""A transcript with two steps. Its encoding contains all tokens that a family of models adds to texts."""
_NOISE, _HALF_NOISE = 1e-4, 0.02
"""The relative change of hidden states or logits that rounding may cause, in float32 and in half precision."""


class Checkpoint:
    """The model that the configuration names at `key`. `name` is its name (of the folder or on the hub) with a version.

    The version is the hub's commit, or a digest of the local files. To avoid reading large weights whole, the digest
    covers the size of each file, and its beginning, middle and end.

    Raises ConfigError: the model is neither a folder nor on the hub.
    """

    def __init__(self, config: ScoringModelConfig, key: str) -> None:
        self.micro_tokens = config.micro_tokens
        self.micro_inputs = config.micro_inputs
        self.drop_oldest = config.long_inputs == "drop_oldest"
        self._config = config
        self._key = key
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = automatic if config.device == "auto" else config.device
        if config.path is None:
            raise ConfigError(f"{key}.path must be set: a local folder or a hub name")
        self.folder = Path(config.path)
        if self.folder.is_dir():
            version = _digest(self.folder)
        else:
            from huggingface_hub import snapshot_download

            with self._refusing():
                self.folder = Path(snapshot_download(config.path, allow_patterns=_HUB_FILES))
            version = self.folder.name[:8]
        self.name = f"{Path(config.path).name}@{version}"
        if config.tokenizer is not None:
            self.name += f" read by {Path(config.tokenizer).name}"

    def refuse(self, problem: str) -> ConfigError:
        """An error that names the key, its value and the problem."""
        return ConfigError(f"{self._key}.path={self._config.path}: {problem}")

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        with self._refusing():
            folder = self._config.tokenizer or self.folder
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=self._config.trust_remote_code)

    def model(self, auto_class: str) -> Any:
        """The model for inference, loaded by the class of transformers that `auto_class` names."""
        import transformers

        gpus = [f"cuda:{number}" for number in range(self._config.gpus)] if self._config.gpus > 1 else [self._device]
        with self._refusing():
            dtype, trust = getattr(torch, self._config.dtype), self._config.trust_remote_code
            spread = {"device_map": "auto", "max_memory": _free_memory(len(gpus))} if len(gpus) > 1 else {}
            with unmeasured_work(f"loading {self._config.path}"):
                model = getattr(transformers, auto_class).from_pretrained(
                    self.folder, dtype=dtype, trust_remote_code=trust, **spread
                )
            model = (model if spread else model.to(self._device)).eval()
        if spread and (elsewhere := {"cpu", "disk"} & {str(device) for device in model.hf_device_map.values()}):
            raise self.refuse(
                f"some of its layers would be on {', '.join(elsewhere)}: set {self._key}.gpus to more GPUs"
            )
        logger.info("%s computes on %s", self._key, " and ".join(map(described, gpus)))
        return model

    def causal_model(self, auto_class: str) -> Any:
        """The model, which must be causal. Raises ConfigError: a token's hidden state depends on later tokens."""
        model = self.model(auto_class)
        with self._refusing():
            causal = is_causal(model.base_model)
        if not causal:
            raise self.refuse("its backbone is not causal, and a step's score must not depend on later tokens")
        return model

    def language_model(self) -> Any:
        """A causal model with its head. Raises ConfigError: the model scales or caps the head's logits."""
        model = self.causal_model("AutoModelForCausalLM")
        with self._refusing():
            plain = logits_are_the_heads(model)
        if not plain:
            raise self.refuse("it scales or caps its logits (as final_logit_softcapping does), which is not supported")
        return model

    def tensors(self, shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
        """Tensors of the weight files by name, in float32 on the model's device.

        Raises ConfigError: a tensor is missing, or has another shape.
        """
        from safetensors import safe_open

        found: dict[str, Tensor] = {}
        with self._refusing():
            for file in sorted(self.folder.glob("*.safetensors")):
                with safe_open(file, "pt") as stored:
                    found |= {name: stored.get_tensor(name) for name in shapes.keys() & set(stored.keys())}
            for file in sorted(self.folder.glob("pytorch_model*.bin")):
                weights = torch.load(file, weights_only=True, mmap=True)
                found |= {name: weights[name] for name in shapes.keys() & weights.keys()}
        for name, shape in shapes.items():
            if name not in found or tuple(found[name].shape) != shape:
                has = tuple(found[name].shape) if name in found else "nothing"
                raise self.refuse(
                    f"the tensor {name} must have the shape {shape}; its weights hold {has}: is it of another family?"
                )
        return [found[name].to(self._device, torch.float32) for name in shapes]

    def encoder(self, encode: Encode, max_tokens: int, rows: int) -> Encoder:
        """An encoder for the model, whose embedding has `rows` rows.

        Raises ConfigError: the embedding lacks a token that the family adds to transcripts.
        """
        self.require_rows(encode(PROBE).ids, rows)
        return Encoder(encode, max_tokens, rows, self.drop_oldest, self.name)

    def require_rows(self, ids: Sequence[int], rows: int) -> None:
        """Raises ConfigError: one of the token ids is beyond the rows of the model's embedding or head."""
        if (largest := max(ids)) < rows:
            return
        text = self.tokenizer().convert_ids_to_tokens(largest)
        raise self.refuse(
            f"family {self._config.family} reads the token {text!r}, whose id is {largest}, and the embedding has "
            f"{rows} rows: set {self._key}.params to the marker or label that the model was trained with, or name the "
            "folder of its own tokenizer"
        )

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError) as error:
            raise self.refuse(f"it cannot be loaded ({type(error).__name__}: {error})") from error


def _free_memory(gpus: int) -> dict[int, int]:
    """The bytes that a model's weights may take on each GPU: nine tenths of the free memory. Activations need the rest.

    The result has no entry for the CPU, so no weights stay in host memory."""
    return {number: torch.cuda.mem_get_info(number)[0] * 9 // 10 for number in range(gpus)}


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(0, size - _SAMPLE)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:8]


@torch.inference_mode()
def is_causal(backbone: Any) -> bool:
    """True if hidden states do not depend on later tokens, measured on two inputs that differ in the last one."""
    tokens = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 7]], device=backbone.device)
    one, other = (backbone(input_ids=each[None]).last_hidden_state[0, :3].float() for each in tokens)
    return _same(one, other, backbone.dtype)


@torch.inference_mode()
def logits_are_the_heads(model: Any) -> bool:
    """True if a causal language model's logits come from its head unchanged, neither scaled nor capped."""
    tokens = torch.tensor([[3, 4, 5, 6]], device=model.device)
    head = model.get_output_embeddings()(model.base_model(input_ids=tokens).last_hidden_state)
    return _same(head.float(), model(input_ids=tokens).logits.float(), model.dtype)


def _same(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    other = other.to(one.device)
    return bool((one - other).norm() <= (_NOISE if dtype == torch.float32 else _HALF_NOISE) * one.norm())
