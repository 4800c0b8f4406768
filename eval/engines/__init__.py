"""Engines that the evaluation serves prompts on."""
