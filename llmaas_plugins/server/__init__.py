"""HTTP server of ``llmaas serve``: llama_cpp.server's app, with our limits, keys and routes."""
