"""`asyncrl evaluate`: measures a model, or a run at any checkpoint, without training."""
