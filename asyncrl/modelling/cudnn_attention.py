"""cuDNN's attention over sequences of any lengths in one call, through the package nvidia-cudnn-frontend.

The tensors are packed: each sequence begins at the row where the sequence before it ends. Preparing a kernel takes
about 50 ms. A kernel is prepared for a maximum number of sequences and a maximum length, and also serves passes with
fewer or shorter sequences. So callers round both numbers up, and need few kernels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

UIDS = {
    name: uid
    for uid, name in enumerate(
        (
            *("query", "key", "value", "output", "normalisers", "of_output", "of_query", "of_key", "of_value"),
            *("query_lengths", "key_lengths", "query_starts", "key_starts", "normaliser_starts"),
        ),
        1,
    )
}
"""The number by which cuDNN knows each tensor."""
MOST_NUMBERS = 2**31 - 1
"""The maximum number of elements in a tensor: offsets within a tensor are int32."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The case for which a kernel is prepared.

    - `sequences`, `tokens`: the maximum numbers of sequences and of tokens in a pass.
    - `queries`, `keys`: the maximum numbers of queries and of keys in one sequence.
    - `window`: the number of latest tokens that each token sees (None: all).
    """

    device: int
    dtype: torch.dtype
    sequences: int
    queries: int
    keys: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    scaling: float
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class CudnnKernel:
    """A kernel of cuDNN for a forward or a backward pass of attention."""

    problem: Problem
    graph: Any

    def run(self, ends: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Read and write `tensors`, which maps names in `UIDS` to contiguous tensors [rows, heads, width], and the name
        `normalisers` to float32[rows, heads]. Rows after the last of `ends` int32[2, sequences + 1] are not written."""
        import cudnn

        problem, device = self.problem, ends.device
        query_lengths, key_lengths = ends.diff()
        places = {
            "query_lengths": query_lengths,
            "key_lengths": key_lengths,
            "query_starts": ends[0] * (problem.heads * problem.width),
            "key_starts": ends[1] * (problem.kv_heads * problem.width),
            "normaliser_starts": ends[0] * problem.heads,
        }
        handle = _handle(problem.device, threading.get_ident())
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        workspace = torch.empty(self.graph.get_workspace_size(), dtype=torch.uint8, device=device)
        addresses = {UIDS[name]: tensor for name, tensor in {**tensors, **places}.items()}
        self.graph.execute(addresses, workspace, handle=handle)


def find_kernel(problem: Problem, backward: bool) -> CudnnKernel | None:
    """Find the kernel that writes `output` and `normalisers`, or with `backward` the kernel that writes the gradients.

    Returns None if cuDNN has no such kernel, if its package is missing, or if training must repeat bit for bit. In the
    forward pass, the queries of a sequence may be those of its last tokens only, and the keys are those of all its
    tokens. In the backward pass, a sequence must have as many queries as keys.
    """
    too_large = problem.tokens * problem.heads * problem.width > MOST_NUMBERS
    if too_large or torch.are_deterministic_algorithms_enabled():
        return None
    return _prepared(problem, backward, threading.get_ident())


@lru_cache(maxsize=512)
def _prepared(problem: Problem, backward: bool, thread: int) -> CudnnKernel | None:
    try:
        import cudnn
    except (ImportError, OSError, RuntimeError) as error:
        _say_once(f"attention uses torch's variable-length kernel, since cuDNN's package cannot be used: {error}")
        return None
    try:
        builder = _Builder(problem, cudnn, _handle(problem.device, thread))
        return CudnnKernel(problem, builder.backward() if backward else builder.forward())
    # These are cuDNN's error for a problem that it does not support, and errors that other versions of the package
    # cause.
    except (
        getattr(cudnn, "cudnnGraphNotSupportedError", RuntimeError),
        RuntimeError,
        AttributeError,
        TypeError,
    ) as error:
        _say_once(f"attention uses torch's variable-length kernel for heads of width {problem.width}: {error}")
        return None


@cache
def _handle(device: int, thread: int) -> Any:
    """cuDNN's handle of one thread. Threads must not share a handle."""
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@cache
def _say_once(message: str) -> None:
    logger.info("%s", message)


@dataclass(slots=True, eq=False)
class _Builder:
    """Describes one pass of attention to cuDNN."""

    problem: Problem
    cudnn: Any
    handle: Any
    graph: Any = field(init=False)
    starts: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        kinds = self.cudnn.data_type
        self.graph = self.cudnn.pygraph(
            io_data_type=kinds.BFLOAT16 if self.problem.dtype == torch.bfloat16 else kinds.HALF,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self.handle,
        )
        bounds = self.problem.sequences + 1
        self.starts = {side: self._integers(f"{side}_starts", bounds) for side in ("query", "key", "normaliser")}

    def forward(self) -> Any:
        problem = self.problem
        output, normalisers = self.graph.sdpa(
            name="forward",
            **self._given(),
            generate_stats=True,
            # The last query of a sequence belongs to the same token as its last key.
            diagonal_alignment=self.cudnn.diagonal_alignment.BOTTOM_RIGHT,
            **self._options(),
        )
        self._write("output", output, "query", problem.heads)
        dims, strides = self._of_normalisers()
        normalisers.set_uid(UIDS["normalisers"]).set_output(True).set_data_type(self.cudnn.data_type.FLOAT)
        normalisers.set_dim(dims).set_stride(strides).set_ragged_offset(self.starts["normaliser"])
        return self._finished()

    def backward(self) -> Any:
        problem = self.problem
        dims, strides = self._of_normalisers()
        normalisers = self.graph.tensor(
            name="normalisers",
            uid=UIDS["normalisers"],
            dim=dims,
            stride=strides,
            data_type=self.cudnn.data_type.FLOAT,
        )
        normalisers.set_ragged_offset(self.starts["normaliser"])
        gradients = self.graph.sdpa_backward(
            name="backward",
            **self._given(),
            o=self._rows("output", "query", problem.heads),
            dO=self._rows("of_output", "query", problem.heads),
            stats=normalisers,
            max_total_seq_len_q=problem.tokens,
            max_total_seq_len_kv=problem.tokens,
            # With BOTTOM_RIGHT this kernel would run at less than half the speed.
            diagonal_alignment=self.cudnn.diagonal_alignment.TOP_LEFT,
            **self._options(),
        )
        self._write("of_query", gradients[0], "query", problem.heads)
        self._write("of_key", gradients[1], "key", problem.kv_heads)
        self._write("of_value", gradients[2], "key", problem.kv_heads)
        return self._finished()

    def _given(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "q": self._rows("query", "query", problem.heads),
            "k": self._rows("key", "key", problem.kv_heads),
            "v": self._rows("value", "key", problem.kv_heads),
            "use_padding_mask": True,
            "seq_len_q": self._integers("query_lengths", problem.sequences),
            "seq_len_kv": self._integers("key_lengths", problem.sequences),
        }

    def _options(self) -> dict[str, Any]:
        window = {} if self.problem.window is None else {"diagonal_band_left_bound": self.problem.window}
        return {"attn_scale": self.problem.scaling, "diagonal_band_right_bound": 0, **window}

    def _integers(self, name: str, count: int) -> Any:
        return self.graph.tensor(
            name=name, uid=UIDS[name], dim=[count, 1, 1, 1], stride=[1] * 4, data_type=self.cudnn.data_type.INT32
        )

    def _rows(self, name: str, side: str, heads: int) -> Any:
        dims, strides = self._of_rows(side, heads)
        tensor = self.graph.tensor(name=name, uid=UIDS[name], dim=dims, stride=strides)
        tensor.set_ragged_offset(self.starts[side])
        return tensor

    def _write(self, name: str, tensor: Any, side: str, heads: int) -> None:
        dims, strides = self._of_rows(side, heads)
        tensor.set_uid(UIDS[name]).set_output(True).set_dim(dims).set_stride(strides)
        tensor.set_ragged_offset(self.starts[side])

    def _of_rows(self, side: str, heads: int) -> tuple[list[int], list[int]]:
        """Dimensions and strides of [sequences, heads, longest, width], stored in memory as [rows, heads, width]."""
        problem = self.problem
        longest = problem.queries if side == "query" else problem.keys
        row = heads * problem.width
        return [problem.sequences, heads, longest, problem.width], [longest * row, problem.width, row, 1]

    def _of_normalisers(self) -> tuple[list[int], list[int]]:
        problem, heads = self.problem, self.problem.heads
        return [problem.sequences, heads, problem.queries, 1], [problem.queries * heads, 1, heads, 1]

    def _finished(self) -> Any:
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        return self.graph
