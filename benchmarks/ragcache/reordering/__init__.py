"""Queues in front of an engine, served in order of arrival or reordered."""
