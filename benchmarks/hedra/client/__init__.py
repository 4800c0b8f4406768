"""Processor time of a workflow server as a client of an engine elsewhere."""
