"""One tenant's tree and mirror of the engine's cache."""
