"""A script in the manner of TRL's example of an agent: vLLM, several GPUs, rows that the script changes, a main()."""

import os

import my_rewards
from datasets import load_dataset
from my_environments import Search as SearchEnv
from rewards.style import brevity
from trl import GRPOConfig, GRPOTrainer


def main():
    train = load_dataset("json", data_files="questions.jsonl", split="train")
    train = train.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    train = train.shuffle(seed=1)
    common = {"learning_rate": 1e-6, "temperature": 0.8}
    config = GRPOConfig(
        output_dir=os.environ["OUT"],
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url="http://10.0.0.7:8000",
        vllm_tensor_parallel_size=2,
        vllm_gpu_memory_utilization=0.8,
        vllm_max_model_length=4096,
        max_completion_length=2048,
        max_tool_calling_iterations=5,
        max_steps=400,
        save_steps=0.25,
        eval_strategy="steps",
        eval_steps=40,
        per_device_train_batch_size=8,
        steps_per_generation=4,
        gradient_accumulation_steps=1,
        num_generations=16,
        num_iterations=2,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.5,
        multi_objective_aggregation="normalize_then_sum",
        chat_template_kwargs={"enable_thinking": False},
        gradient_checkpointing=False,
        deepspeed="zero3.json",
        push_to_hub=True,
        **common,
    )
    trainer = GRPOTrainer(
        "Qwen/Qwen3-4B",
        [my_rewards.found, brevity],
        config,
        train,
        eval_dataset=load_dataset("json", data_files="held_out.jsonl", split="train"),
        environment_factory=SearchEnv,
    )
    trainer.train()


if __name__ == "__main__":
    main()
