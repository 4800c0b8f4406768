"""Alias of `ragorder.eval.experiments.attention`."""

from ragorder.eval.experiments.attention.__main__ import main

if __name__ == "__main__":
    main()
