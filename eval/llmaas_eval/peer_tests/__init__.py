"""llama-cpp-python's own tests, without and with the plugins: ``make peer-tests``.

The tests come from the sdist of the installed version and run unchanged; the models they would
download are generated. Each test must end the same way, and get the same logits, tokens, texts and
states from the engine, whether the suite is off, on with nothing enabled, or on with ``kv_chunks``.
"""
