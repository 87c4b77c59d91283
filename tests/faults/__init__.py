"""Tests of the tests: planted faults must be found."""
