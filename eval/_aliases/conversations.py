"""Alias of `ragorder.eval.experiments.conversations.measuring`."""

from ragorder.eval.experiments.conversations.measuring import main

if __name__ == "__main__":
    main()
