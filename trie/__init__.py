"""Knowledge tree, prefix searches, tail policies, residency and batch plans."""
