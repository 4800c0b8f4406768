"""Former command of the suites attention-kernel (with a GPU) and attention-check."""

import torch

from ragorder.eval._aliases.command import run_suite

if __name__ == "__main__":
    suite = "attention-kernel" if torch.cuda.is_available() else "attention-check"
    run_suite(suite, former={"--contender": lambda name: ["--policy", name]})
