"""Cost of scheduling workflows: suite hedra-overhead."""
