"""Alias of `ragorder.eval.experiments.reordering.measuring`."""

from ragorder.eval.experiments.reordering.measuring import main

if __name__ == "__main__":
    main()
