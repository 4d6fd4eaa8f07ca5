"""Benchmarks in the field's terms: load on a model or a server, latencies of every request, what the machine did."""
