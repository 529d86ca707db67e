"""`flexroll check`: is a run's folder whole, traceable, of equal work and within what its device can do.

A check is one function in `files`, `provenance`, `work`, `quality`, `plausibility` or `noise`: its docstring is the
rule, the decorator `registry.check` says what it looks at, and it yields a finding for what breaks the rule.
"""
