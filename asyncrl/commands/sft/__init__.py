"""`asyncrl sft`: fine-tuning on demonstrations alone, by the learner's policy, passes, ranks and checkpoints."""
