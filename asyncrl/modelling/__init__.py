"""What learner, engines and weights share about models: attention, log-probs, shapes, the format of weights."""
