"""Files written for verl, which run here as they are."""
