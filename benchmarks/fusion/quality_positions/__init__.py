"""Answers of a small trained model by the place of what they need: suite quality-positions."""
