"""Train small additions to a model by the predictions of the whole model (extra ``train``).

``trainer`` runs the steps: alone, or as one of the processes that ``torchrun`` started.
``recovery`` learns an adapter for a level of an elastic model.
"""
