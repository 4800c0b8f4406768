"""Bindings to frameworks, engines and servers; each needs the extra that it names."""
