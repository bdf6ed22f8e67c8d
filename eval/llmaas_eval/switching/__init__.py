"""Switching between many contexts on one engine: this suite against other systems (LLMS §4 and §5).

The systems move KV cells for real. Instead of evaluating the tokens that a service would evaluate,
the replay injects synthetic cells. Evaluation that a system itself makes necessary is charged at
its measured cost. Each system runs in a process of its own. All memory that it uses beyond the
engine itself counts in one budget.
"""
