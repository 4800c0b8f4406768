"""Alias of `ragorder.eval.experiments.workers.measuring`."""

from ragorder.eval.experiments.workers.measuring import main

if __name__ == "__main__":
    main()
