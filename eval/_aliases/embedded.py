"""Former command of the suites embedded-prefill and embedded-serving."""

import sys

from ragorder.eval._aliases.command import run_suite

if __name__ == "__main__":
    suites = {"prefill": "embedded-prefill", "serve": "embedded-serving"}
    if len(sys.argv) < 2 or sys.argv[1] not in suites:
        sys.exit("usage: python -m ragorder.eval.embedded prefill|serve [OPTIONS]")
    run_suite(suites[sys.argv[1]], sys.argv[2:])
