"""Settings of services in this process, and what llama.cpp alone replies."""

from __future__ import annotations

# Evaluate tokens one by one: texts must not depend on the tokens that are evaluated again. In
# batches of other sizes llama.cpp adds floats in another order.
ENGINE = {"n_ctx": 512, "n_ubatch": 1, "n_threads_batch": 1, "flash_attn": True}
GREEDY = {"temperature": 0.0, "max_tokens": 12}
TURNS = ("Hello, how are you?", "Where is the station?")
