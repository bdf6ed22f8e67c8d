"""Report of changes in the next llama.cpp that matter to the engine: ``make canary``.

``xllamacpp`` is a package on PyPI that follows llama.cpp closely and exports all functions of ggml
and libllama. The probe describes its newest build and the installed llama-cpp-python in the same
way. Then it runs a model on that build with our compiled library.
"""
