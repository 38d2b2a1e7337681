"""The commands `asyncrl export` and `asyncrl evaluate`: what a run has learnt, at any checkpoint, without training."""
