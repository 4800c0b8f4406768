"""KV that a knowledge base and its users' uploads take, by how it is found again: suite fusion-storage."""
