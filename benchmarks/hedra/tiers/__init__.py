"""An index whose most used clusters lie in a faster place (HedraRAG section 4.4)."""
