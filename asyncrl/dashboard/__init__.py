"""A page that shows runs as they go on and after: figures, health and episodes, served to one browser."""
