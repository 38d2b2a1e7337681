"""`asyncrl sft`: supervised fine-tuning on demonstrations, with the learner's policy, passes, ranks and checkpoints."""
