"""A GPU day: other suites in the shapes of 7B models with random weights, within a budget of time: suite gpu-day."""
