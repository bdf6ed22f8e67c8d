"""One model in many widths, switched for each request (ElastiLM, §3.2).

``units`` says what can be left out of a model, ``reordering`` puts what matters first, and
``prepared_file`` writes that with the widths of each level; any llama.cpp loads such a file.
"""
