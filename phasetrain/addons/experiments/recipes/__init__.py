"""Recipes: experiments on real data whose results can be checked with one command."""
