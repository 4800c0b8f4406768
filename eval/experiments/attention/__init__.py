"""The attention kernel against what else there is: checked everywhere, timed on a GPU."""
