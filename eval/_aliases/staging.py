"""Alias of `ragorder.eval.experiments.staging.measuring`."""

from ragorder.eval.experiments.staging.measuring import main

if __name__ == "__main__":
    main()
