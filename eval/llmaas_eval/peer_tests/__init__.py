"""llama-cpp-python's own tests, run with and without the plugins: ``make peer-tests``.

The tests come from the sdist of the installed version and run unchanged. Generated models replace
the models that they would download. Each test must have the same outcome in every mode: without
the suite, with no plugin enabled, and with ``kv_chunks``. It must also get the same logits, tokens,
texts and states from the engine.
"""
