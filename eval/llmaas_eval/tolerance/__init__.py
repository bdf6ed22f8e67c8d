"""Quality of tolerance-aware compression (LLMS §3.2): recall and perplexity after a restore."""
