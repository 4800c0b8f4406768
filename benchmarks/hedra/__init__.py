"""HedraRAG: workflows and searches."""
