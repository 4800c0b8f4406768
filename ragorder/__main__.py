"""`python -m ragorder`: the command line."""

from ragorder.cli import main

main(prog_name="ragorder")
