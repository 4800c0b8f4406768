"""Servers on a virtual clock: the product's own code in an event loop whose time is computed, not waited for."""
