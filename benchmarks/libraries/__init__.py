"""Other libraries' MoE layers as peers: what each takes of a problem, and which shapes it computes.

Each module has `why_unsuited(shape)` and one function or more that take a problem and give what is timed. A library is
imported only when one of these is called.
"""
