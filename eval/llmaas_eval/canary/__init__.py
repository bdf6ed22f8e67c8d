"""Report of changes in the next llama.cpp that matter to the engine: ``make canary``.

``xllamacpp`` is a package on PyPI that follows llama.cpp closely and exports all of ggml's and
libllama's functions. Its newest build is asked the same questions as the installed
llama-cpp-python, and our library, as it was compiled, computes a model on it.
"""
