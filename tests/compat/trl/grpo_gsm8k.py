"""A script in the manner of TRL's quick start: a data set of the hub, one reward of TRL and one of its own, LoRA."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
BATCH = 4
dataset = load_dataset("openai/gsm8k", "main", split="train")


def correctness(prompts, completions, answer, **kwargs):
    return [
        1.0 if truth.split("####")[-1].strip() in text else 0.0 for text, truth in zip(completions, answer, strict=True)
    ]


training_args = GRPOConfig(
    output_dir="runs/Qwen2.5-0.5B-GRPO",
    run_name=f"{MODEL.split('/')[-1]}-grpo",
    learning_rate=5e-6,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    logging_steps=1,
    bf16=True,
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=4,
    num_generations=2 * BATCH,
    max_prompt_length=256,
    max_completion_length=786,
    num_train_epochs=1,
    save_steps=100,
    max_grad_norm=0.1,
    report_to=["wandb", "swanlab"],
    reward_weights=[0.5, 2.0],
    scale_rewards=False,
    loss_type="dr_grpo",
    top_p=0.9,
    no_such_key=3,
)
training_args.beta = 0.04
trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[think_format_reward, correctness],
    args=training_args,
    train_dataset=dataset,
    peft_config=LoraConfig(
        r=16, lora_alpha=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.05
    ),
)
trainer.train()
