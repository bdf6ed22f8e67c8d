"""The next token's distribution, mixed with the targets of near pairs."""
