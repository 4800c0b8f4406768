"""Knowledge tree with prefix searches, tail policies, residency and batch plans."""
