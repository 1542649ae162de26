"""Output for people: report, bundle and export, metrics, alerts. Reads stored data only and sends
no request to the guard."""
