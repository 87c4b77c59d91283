"""Behaviour that the torch and the JAX front-end share, once for both."""
