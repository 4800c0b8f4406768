"""FusionRAG: reused documents."""
