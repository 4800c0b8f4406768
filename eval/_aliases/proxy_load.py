"""Alias of `ragorder.eval.experiments.proxy_load.measuring`."""

from ragorder.eval.experiments.proxy_load.measuring import main

if __name__ == "__main__":
    main()
