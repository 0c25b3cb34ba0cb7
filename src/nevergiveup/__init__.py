"""nevergiveup: reinforcement learning of language models that spends samples where they teach most.

Importing this package imports nothing heavy: layers 0 to 2 (types, advantages, strategies, events, scheduler, protocols,
metrics, loop, evaluate) need the standard library only.
"""

__version__ = "0.1.0"
