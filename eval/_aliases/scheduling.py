"""Former command of the suite ragcache-scheduling."""

import sys

from ragorder.eval._aliases.command import run_suite

if __name__ == "__main__":
    history = "--no-history" not in sys.argv
    run_suite(
        "ragcache-scheduling",
        [each for each in sys.argv[1:] if each not in ("--history", "--no-history")],
        former={
            # LRU is the same with a history.
            "--policy": lambda name: ["--policy", f"{name}+history" if history and name != "lru" else name],
            "--requests": lambda count: ["--limit", count],
            "--seed": lambda seed: ["--seeds", seed],
        },
        defaults=["--seeds", "0"],
    )
