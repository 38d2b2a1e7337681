"""What several rooms know of models."""
