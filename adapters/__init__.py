"""Bindings to frameworks, engines and servers; each names its extra."""
