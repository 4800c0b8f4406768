"""Questions to one command within a memory budget, against transformers: suite doll-questions."""
