"""Curves after the fact: with the whole run at hand, both sides of a step can be looked at."""
