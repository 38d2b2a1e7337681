"""The demo's task with TRL's GRPOTrainer, for `benchmarks.versus_trl`. It repeats the demo's calculator and rule,
because it runs in an environment without asyncrl.

Every line on the standard output is a JSON object for a step: its number, the time of its end, and its mean reward.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from typing import Any

import pyarrow.parquet
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

TURNS = 6
COMPLETION_TOKENS = 192


def calculator(operator: str, expression: str) -> str:
    """Works out the leftmost operation with the given operator, and returns the expression left.

    Args:
        operator: one of + - *
        expression: whole numbers with + - * between them
    """
    if not re.fullmatch(r"-?[0-9]+([+*-]-?[0-9]+)*", expression):
        return "Error: write whole numbers with + - * between them, such as 7+5*3."
    terms = re.findall(r"(-?\d+)([+*-]?)", expression)
    numbers, operators = [int(number) for number, _ in terms], [operator for _, operator in terms[:-1]]
    if operator not in operators:
        return f"Error: there is no {operator} in {expression}."
    index = operators.index(operator)
    left, right = numbers[index : index + 2]
    numbers[index : index + 2] = [{"+": left + right, "-": left - right, "*": left * right}[operator]]
    del operators[index]
    return "".join(f"{number}{operator}" for number, operator in zip(numbers, [*operators, ""], strict=True))


def exact_number(completions: list[list[dict[str, Any]]], ground_truth: list[str], **_: Any) -> list[float]:
    """1 if the last number of the last message is the right one, else 0."""
    numbers = [re.findall(r"-?\d+", completion[-1].get("content") or "") for completion in completions]
    return [float(found[-1:] == [truth]) for found, truth in zip(numbers, ground_truth, strict=True)]


class Reporter(TrainerCallback):
    """Prints a line for each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "reward" in logs:
            line = {"step": state.global_step, "time": time.time(), "reward": logs["reward"]}
            print(json.dumps(line), flush=True)


def tasks(path: str) -> Dataset:
    rows = pyarrow.parquet.read_table(path).to_pylist()
    return Dataset.from_list(
        [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the demo's policy")
    parser.add_argument("--train", required=True, help="Parquet file of the demo's tasks")
    parser.add_argument("--out", required=True, help="folder that TRL may write to")
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    # The demo's template has Qwen's form, which TRL recognises by its exact text only.
    tokenizer.response_template = qwen3_template
    config = GRPOConfig(
        output_dir=arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=64,
        num_generations=8,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_completion_length=COMPLETION_TOKENS,
        max_tool_calling_iterations=TURNS - 1,
        model_init_kwargs={"dtype": torch.float32},
        # TRL's defaults cost time: they save memory and log more.
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        arguments.model,
        reward_funcs=exact_number,
        args=config,
        train_dataset=tasks(arguments.train),
        processing_class=tokenizer,
        tools=[calculator],
        callbacks=[Reporter()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
