"""Bindings to frameworks, engines and servers; each module needs the extra that it names."""
