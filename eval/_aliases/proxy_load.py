"""Former command of the suite proxy-load."""

from ragorder.eval._aliases.command import run_suite

if __name__ == "__main__":
    run_suite("proxy-load", defaults=["--seeds", "0"])
