"""Ours against stock DCP and the bare engine, under the same emulated latency.

``python -m benchmarks`` runs everything; see docs/performance.md for the last results.
"""
