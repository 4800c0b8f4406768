"""Commands that measure, imported by name from `ragorder.cli.main` when they are called."""
