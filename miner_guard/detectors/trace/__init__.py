"""Curves after the fact: the whole run is at hand, so a step can be judged from both sides."""
