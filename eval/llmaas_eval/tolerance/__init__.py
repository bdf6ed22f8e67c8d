"""Quality of tolerance-aware compression (LLMS §3.2): what a restored context still knows."""
