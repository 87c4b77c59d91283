"""Tests of the parity tool, and that the front-ends agree bit by bit."""
