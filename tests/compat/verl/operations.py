"""Programs of operations on DataProto, carried out with any class of that interface: ours, or verl's in a process of
its own, as which this file is run. It imports neither.

A program begins with descriptions of batches. Each operation works on one of the batches that exist, and adds those
that it returns. After each one, all batches are described as plain data.
"""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

Program = Mapping[str, Any]


class Library:
    """The names under test: those of a module like verl's `protocol`, and the function of positions."""

    def __init__(self, protocol: Any, positions: Any) -> None:
        self.protocol, self.proto, self.positions = protocol, protocol.DataProto, positions
        self.pad, self.unpad = protocol.pad_dataproto_to_divisor, protocol.unpad_dataproto


def make(proto: Any, given: Mapping[str, Any]) -> Any:
    """The batch that is described by `given`."""
    rows = given["rows"]
    tensors, arrays = {}, {}
    for name, (kind, shape, first) in given["tensors"].items():
        if kind == "nested":
            tensors[name] = _nested(rows, shape, first)
            continue
        count = rows * int(np.prod(shape))
        values = torch.arange(first, first + count).reshape(rows, *shape)
        tensors[name] = (values % 2 == 0) if kind == "bool" else values.to(getattr(torch, kind))
    for name, (kind, first) in given["arrays"].items():
        numbers = [first + row for row in range(rows)]
        if kind == "object":
            array = np.empty(rows, dtype=object)
            array[:] = [{"row": number, "text": f"row {number}"} for number in numbers]
        elif kind == "matrix":
            array = np.array([[number, -number] for number in numbers], dtype=np.int64).reshape(rows, 2)
        else:
            array = np.array([f"t{number}" for number in numbers] if kind == "str" else numbers, dtype=kind)
        arrays[name] = array
    return proto.from_dict(tensors, arrays, json.loads(json.dumps(given["meta_info"])))


def _nested(rows: int, shape: Sequence[int], first: int) -> torch.Tensor:
    """Rows of 0 to 2 elements of this shape."""
    lengths = [(first + row) % 3 for row in range(rows)]
    values = torch.arange(sum(lengths) * int(np.prod(shape))).reshape(-1, *shape)
    return torch.nested.as_nested_tensor([each.clone() for each in values.split(lengths)], layout=torch.jagged)


def described(data: Any) -> Any:
    """Describe a batch, or a row of one: its sizes and its fields."""
    tensors = {} if data.batch is None else {name: data.batch[name] for name in data.batch.keys()}  # noqa: SIM118
    return {
        "rows": len(data) if hasattr(data, "check_consistency") else None,
        "batch_size": None if data.batch is None else list(data.batch.batch_size),
        "batch": {name: _tensor(each) for name, each in tensors.items()},
        "arrays": {name: _array(each) for name, each in data.non_tensor_batch.items()},
        "meta_info": copy.deepcopy(data.meta_info),
    }


def _tensor(tensor: torch.Tensor) -> Any:
    if tensor.is_nested:
        return [str(tensor.dtype), "nested", [_tensor(row) for row in tensor.unbind()]]
    return [str(tensor.dtype), list(tensor.shape), tensor.tolist()]


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), value.tolist()]
    return value.item() if isinstance(value, np.generic) else value


def _index(library: Library, data: Any, kind: str, values: Any) -> Any:
    match kind:
        case "int":
            return data[values]
        case "slice":
            return data[slice(*values)]
        case "list":
            return data[values]
        case "array":
            return data[np.array(values, dtype=np.int64)]
        case "tensor":
            return data[torch.tensor(values, dtype=torch.int64)]
        case "mask":
            return data[np.array(values, dtype=bool)]
        case "tensor_mask":
            return data[torch.tensor(values, dtype=torch.bool)]
        case "bool_list":
            return data[[bool(value) for value in values]]
    return data[values]


def _pad(library: Library, data: Any, divisor: int) -> Any:
    padded, added = library.pad(data, divisor)
    return [padded, library.unpad(padded, added)]


def _set(library: Library, data: Any, name: str, size: int) -> None:
    data.batch[name] = torch.arange(size)


def _changed_set(library: Library, data: Any, name: str) -> Any:
    """A part, of which a tensor is changed in place: whether memory is shared shows in the whole."""
    part = data[0:2]
    if part.batch is not None and name in part.batch.keys():  # noqa: SIM118
        part.batch[name].zero_()
    part.meta_info["seen"] = True
    return part


def _fold(library: Library, data: Any, count: int, dimensions: int) -> Any:
    def folded() -> Any:
        # verl folds the arrays of the given batch as well.
        copied = data.select(non_tensor_batch_keys=list(data.non_tensor_batch))
        return library.protocol.fold_batch_dim(copied, count)

    return [folded(), library.protocol.unfold_batch_dim(folded(), dimensions)]


def _chunk_with_padding(library: Library, data: Any, count: int) -> Any:
    config = library.protocol.DataProtoConfig
    config.auto_padding = True
    try:
        return data.chunk(count)
    finally:
        config.auto_padding = False


def _union_tensors(library: Library, data: Any, name: str, new: str) -> None:
    other = data.batch.clone()
    other.rename_key_(name, new)
    library.protocol.union_tensor_dict(data.batch, other)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "index": _index,
    "pad": _pad,
    "set": _set,
    "changed_part": _changed_set,
    "select": lambda library, data, *keys: data.select(*keys),
    "deep_select": lambda library, data: data.select(deepcopy=True),
    "pop": lambda library, data, *keys: data.pop(*keys),
    "rename": lambda library, data, old, new: data.rename(old, new),
    "chunk": lambda library, data, count: data.chunk(count),
    "split": lambda library, data, size: data.split(size),
    "repeat": lambda library, data, times, interleave: data.repeat(times, interleave),
    "sample_level_repeat": lambda library, data, times: data.sample_level_repeat(times),
    "unfold": lambda library, data, count, names: data.unfold_column_chunks(count, names),
    "reorder": lambda library, data, order: data.reorder(torch.tensor(order, dtype=torch.int64)),
    "padding": lambda library, data, size, which: data.padding(size, which),
    "iterate": lambda library, data, size, epochs, seed, shuffle: list(
        data.make_iterator(size, epochs, seed, {"shuffle": shuffle})
    ),
    "to": lambda library, data: data.to("cpu"),
    "fold": _fold,
    "chunk_with_padding": _chunk_with_padding,
    "union_tensors": _union_tensors,
    "collate": lambda library, data, rows: library.protocol.collate_fn([data[row] for row in rows]),
    "pickle": lambda library, data: pickle.loads(pickle.dumps(data)),  # noqa: S301
}


def run(library: Library, program: Program) -> list[Any]:
    """Return the outcome of each operation. The first error ends the program: the last outcome names its classes."""
    batches: list[Any] = []
    outcomes: list[Any] = []
    try:
        batches = [make(library.proto, given) for given in program["batches"]]
        for name, on, arguments in program["operations"]:
            data = batches[on % len(batches)]
            if data.batch is None and not data.non_tensor_batch:
                outcomes.append("no fields")  # There are no rows then, and verl checks nothing.
                continue
            if name == "union":
                result = data.union(batches[arguments[0] % len(batches)])
            elif name == "concat":
                result = library.proto.concat([data, *(batches[each % len(batches)] for each in arguments)])
            else:
                result = OPERATIONS[name](library, data, *arguments)
            found = result if isinstance(result, list) else [] if result is None else [result]
            batches += [each for each in found if hasattr(each, "check_consistency")]
            outcomes.append([described(each) for each in found] + [described(each) for each in batches])
            del batches[12:]
    except Exception as error:  # noqa: BLE001
        outcomes.append({"error": [each.__name__ for each in type(error).__mro__], "message": str(error)})
    return outcomes


class CharTokenizer:
    """Token ids are code points; 0 pads, and 1 ends a text."""

    eos_token = "<end>"

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join({0: "", 1: "" if skip_special_tokens else "<end>"}.get(int(each), chr(each)) for each in ids)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


def score_number(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return len(solution_str) + 0.5 * (ground_truth in solution_str) - (data_source == "b")


def score_mapping(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    turns = extra_info.get("num_turns")
    scores = extra_info["rollout_reward_scores"]
    return {"score": float(solution_str == ground_truth), "pred": solution_str, "turns": turns, "tool": scores.get("x")}


def score_all(
    data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, scale: float = 1.0
) -> list[float]:
    """Each answer against the longest of all: it needs the whole batch."""
    longest = max(map(len, solution_strs))
    return [scale * (len(each) - longest) for each in solution_strs]


SCORES = {"number": score_number, "mapping": score_mapping, "all": score_all}


def judged_batch(proto: Any, given: Mapping[str, Any]) -> Any:
    """A batch of rows of [prompt, response, ground truth, data source, tool score]."""
    rows = given["rows"]
    prompts, responses = (max(len(row[column]) for row in rows) for column in (0, 1))
    ids = torch.zeros(len(rows), prompts + responses + 2, dtype=torch.int64)
    for row, (prompt, response, *_) in enumerate(rows):
        ids[row, prompts - len(prompt) : prompts] = torch.tensor([ord(each) for each in prompt])
        ids[row, prompts : prompts + len(response) + 1] = torch.tensor([*(ord(each) for each in response), 1])
    tensors = {
        "prompts": ids[:, :prompts],
        "responses": ids[:, prompts:],
        "attention_mask": (ids != 0).to(torch.int64),
    }
    arrays = {
        "reward_model": [{"ground_truth": row[2]} for row in rows],
        "data_source": [row[3] for row in rows],
        "extra_info": [{} for _ in rows],
        "reward_scores": [{"x": row[4]} for row in rows],
        "__num_turns__": [2 for _ in rows],
    }
    return proto.from_dict(tensors, {name: np.array(values, dtype=object) for name, values in arrays.items()})


def judged(proto: Any, manager: Any, given: Mapping[str, Any]) -> Any:
    """Judge the rows of `judged_batch` with a reward manager."""
    data = judged_batch(proto, given)
    result = manager(data, return_dict=True)
    acc = data.batch["acc"].tolist() if "acc" in data.batch.keys() else None  # noqa: SIM118
    extra = {name: [_plain(each) for each in values] for name, values in result.get("reward_extra_info", {}).items()}
    return {"rewards": result["reward_tensor"].tolist(), "extra": extra, "acc": acc}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, int | float | bool | torch.Tensor | np.generic) else value


class Section(dict[str, Any]):
    """A part of verl's configuration: its entries are attributes too."""

    __getattr__ = dict.__getitem__


def parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    params = {name: Section(value) if isinstance(value, dict) else value for name, value in given["params"].items()}
    return {"tokenizer": CharTokenizer(), "num_examine": 1, "compute_score": SCORES[given["score"]], **params}


def judged_singly(proto: Any, find: Callable[[str], Any], given: Mapping[str, Any]) -> Any:
    """Judge each row of `judged_batch` with a reward manager for single rows."""
    from omegaconf import OmegaConf

    data, name = judged_batch(proto, given), given["loop_manager"]
    config = OmegaConf.create({"reward": {**given["params"], "reward_kwargs": given["params"]}, **given["config"]})

    async def judge() -> Any:
        manager = find(name)(config=config, tokenizer=CharTokenizer(), compute_score=SCORES[given["score"]])
        results = [await manager.run_single(data[row : row + 1]) for row in range(len(data))]
        scores = [float(each["reward_score"]) for each in results]
        extra = [{key: _plain(each) for key, each in result["reward_extra_info"].items()} for result in results]
        return {"rewards": manager.assemble_rm_scores(data, scores).tolist(), "scores": scores, "extra": extra}

    return asyncio.run(judge())


def in_file_or(by_name: Callable[[str], Any], name: str) -> Any:
    """The class `name`: FILE.py:CLASS, or what `by_name` finds."""
    file, _, cls = name.rpartition(":")
    return runpy.run_path(file)[cls] if file else by_name(name)


def positions(library: Library, mask: Sequence[Sequence[int]]) -> Any:
    return library.positions(torch.tensor(mask, dtype=torch.int64)).tolist()


def as_json(answer: Any) -> str:
    return json.dumps(answer, default=lambda each: each.item())


def _serve() -> None:
    """Carry out the programs on standard input with verl, one a line."""
    from verl import DataProto, protocol
    from verl.utils.model import compute_position_id_with_mask
    from verl.workers.reward_manager import get_reward_manager_cls

    library = Library(protocol, compute_position_id_with_mask)
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        program = json.loads(line)
        if "loop_manager" in program:
            from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls as by_name

            answer = judged_singly(DataProto, partial(in_file_or, by_name), program)
        elif "manager" in program:
            manager = get_reward_manager_cls(program["manager"])(**parameters(program))
            answer = judged(DataProto, manager, program)
        else:
            answer = positions(library, program["mask"]) if "mask" in program else run(library, program)
        answers.write(as_json(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
