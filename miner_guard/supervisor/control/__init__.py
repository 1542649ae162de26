"""How people and service managers reach the running guard."""
