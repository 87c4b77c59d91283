"""Recipes around the layers, with the libraries that users run them with."""
