"""`asyncrl merge`: writes a sharded checkpoint of asyncrl, verl or Megatron as one Hugging Face folder."""
