"""Alias of the suite staged-search."""

from ragorder.eval._aliases.command import run_suite

if __name__ == "__main__":
    run_suite("staged-search")
