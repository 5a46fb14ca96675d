"""Networks that draft: the same modules when they are trained and when they guess.

A network knows nothing of caches or trees. The caller says how its rows attend (`Attend`): over pages while
decoding, under a mask while training.
"""
