"""What people are told: report, bundle and export, metrics, alerts. Reads what is stored, asks
nothing of the guard."""
