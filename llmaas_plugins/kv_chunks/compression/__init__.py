"""How many bits a chunk keeps, chosen by the attention that it receives (LLMS §3.2)."""
