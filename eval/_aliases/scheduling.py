"""Alias of `ragorder.eval.experiments.replacement.scheduling`."""

from ragorder.eval.experiments.replacement.scheduling import main

if __name__ == "__main__":
    main()
