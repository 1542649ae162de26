"""What leaves the guard: report, bundle, export, metrics, alerts. This package reads only stored
data and sends no request to the guard."""
