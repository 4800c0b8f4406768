"""Small parts that every folder may import."""
