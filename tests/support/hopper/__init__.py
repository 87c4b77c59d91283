"""A model of a Hopper block that runs the kernels' own Gluon functions: what NVIDIA's racecheck cannot see.

racecheck knows barriers of threads, not those that TMA completes. Here the Python source of a kernel runs, each
partition as two warps, on stand-ins for Gluon's operations: numbers that order memory (facts of tiles, stages, phases,
counts) are real, values of matrices are not. Barriers have Hopper's arrivals, bytes and parities; TMA, cp.async, wgmma
and TMA stores take effect at some later moment. Every access of shared memory has a vector clock, so that two accesses
which nothing orders are found whichever of them happened first. See docs/developer/testing.md.
"""
