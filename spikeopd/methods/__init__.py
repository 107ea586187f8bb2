"""Training: the two stages, the controls of the second, and what they share."""
