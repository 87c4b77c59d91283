"""Mutation of the sources: does some test fail when one operator, cast, mask or bound is wrong?"""
