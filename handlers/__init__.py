"""What to do next: commands and `decide`, `react`, the writer's `execute`, and the effect loop.

`decide` and `react` are plain functions on frozen values, without clock, randomness, I/O or
configuration; effects live in one loop over one outbox (effects.py).
"""
