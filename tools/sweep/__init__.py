"""A sweep over every family of transformers that has experts: what of it runs on Moebius."""
