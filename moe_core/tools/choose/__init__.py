"""The command `moebius-choose`: format, memory, speed and parallelism of a model on some GPUs, by records and bounds.

`python -m benchmarks.choosing` collects the records' times into `measured.json`, and writes the tables of the docs.
"""
