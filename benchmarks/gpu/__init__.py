"""All that a GPU is needed for, in one command."""
