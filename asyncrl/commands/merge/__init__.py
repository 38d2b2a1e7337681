"""The command `asyncrl merge`: checkpoints in shards, ours or of verl, as one Hugging Face folder."""
