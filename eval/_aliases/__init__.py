"""Documented commands (`python -m ragorder.eval.NAME`) whose modules have moved."""
