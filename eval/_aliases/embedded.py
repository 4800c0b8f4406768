"""Alias of `ragorder.eval.experiments.embedded`."""

from ragorder.eval.experiments.embedded.__main__ import main

if __name__ == "__main__":
    main()
