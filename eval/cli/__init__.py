"""The commands that measure. `ragorder.cli.main` names them by strings, so that nothing else loads this package."""
