"""A run as a job of Slurm."""
