"""Repeats random updates while a run trains, to find silent corruption."""
