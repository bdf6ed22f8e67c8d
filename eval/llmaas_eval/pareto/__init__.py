"""Study of perplexity against memory and time: low-bit models, streaming, sparse tokens, levels."""
